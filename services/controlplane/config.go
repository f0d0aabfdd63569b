package controlplane

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Config is how a controlplane behaves; the tags are kong's.
type Config struct {
	Addr       string `name:"addr" env:"AEGIS_CONTROLPLANE_ADDR" default:"127.0.0.1:8090" help:"Where the admin API is served."`
	PolicyFile string `name:"policy-file" env:"AEGIS_CONTROLPLANE_POLICY_FILE" type:"path" help:"Policy (YAML or JSON) to begin with where NATS holds no config yet."`
	// AdminToken is what X-Admin-Token must carry; without one, only HTTP callers on this machine are served. Mains
	// take it from TokenEnv: a flag would show it to everybody on the machine.
	AdminToken        string   `kong:"-"`
	AdminTokenFile    string   `name:"admin-token-file" env:"AEGIS_ADMIN_TOKEN_FILE" type:"path" help:"File holding the admin token, read at the start; or give it as AEGIS_ADMIN_TOKEN."`
	RulesDSN          string   `name:"rules-dsn" env:"AEGIS_RULES_DSN" help:"PostgreSQL that holds users, keys and plans, such as postgres://aegis@postgres/aegis. Default: they lie in JetStream."`
	RulesReadDSN      string   `name:"rules-read-dsn" env:"AEGIS_RULES_READ_DSN" help:"A replica of it for reads."`
	RulesPasswordFile string   `name:"rules-password-file" env:"AEGIS_RULES_PASSWORD_FILE" type:"path" help:"File holding the password of both."`
	Origins           []string `name:"origins" env:"AEGIS_CONTROLPLANE_ORIGINS" help:"Origins whose pages may use the WebSocket, such as https://admin.example.com, besides the API's own."`
	Hosts             []string `name:"hosts" env:"AEGIS_CONTROLPLANE_HOSTS" help:"Names by which the API may be called by pages, such as admin.example.com:8090, besides this machine's own."`

	// ConfigKey is the secret that versions are signed by; "": they are not. Mains take it from ConfigKeyEnv.
	ConfigKey    string        `kong:"-"`
	DrainTimeout time.Duration `name:"drain-timeout" env:"AEGIS_CONTROLPLANE_DRAIN_TIMEOUT" default:"5s" help:"On shutdown, how long requests under way may take."`

	// AllowTokenlessNATS takes commands over NATS although there is no token: for
	// `aegis up`, whose NATS serves this machine only.
	AllowTokenlessNATS bool `kong:"-"`
}

// TokenEnv names the environment variable with the admin token.
const TokenEnv = "AEGIS_ADMIN_TOKEN"

// ConfigKeyEnv names the environment variable with the secret that versions of the policy are signed by.
const ConfigKeyEnv = "AEGIS_CONFIG_KEY"

// DefaultConfig is what the flags default to.
func DefaultConfig() Config {
	return Config{Addr: "127.0.0.1:8090", DrainTimeout: 5 * time.Second}
}

// Validate reports the first setting that can't work.
func (c Config) Validate() error {
	switch {
	case c.Addr == "":
		return errors.New("addr: must be set, for instance 127.0.0.1:8090")
	case c.AdminToken != "" && c.AdminTokenFile != "":
		return errors.New("admin-token, admin-token-file: set one of them, not both")
	case c.RulesDSN == "" && (c.RulesReadDSN != "" || c.RulesPasswordFile != ""):
		return errors.New("rules-read-dsn, rules-password-file: set rules-dsn too")
	case c.DrainTimeout < 0:
		return errors.New("drain-timeout: must not be negative")
	}
	return nil
}

// StopTimeout bounds how long Run takes after its context ends.
func (c Config) StopTimeout() time.Duration { return c.DrainTimeout + auditFlush + 5*time.Second }

// tokenDigest is the SHA-256 of the admin token, nil where none is configured.
// A file that is empty is an error: it would open what its owner meant to close.
func (c Config) tokenDigest() (*[sha256.Size]byte, error) {
	token := []byte(c.AdminToken)
	if c.AdminTokenFile != "" {
		data, err := os.ReadFile(c.AdminTokenFile)
		if err != nil {
			return nil, fmt.Errorf("admin-token-file: %w", err)
		}
		if token = bytes.TrimRight(data, "\r\n"); len(token) == 0 {
			return nil, fmt.Errorf("admin-token-file: %s is empty", c.AdminTokenFile)
		}
	}
	if len(token) == 0 {
		return nil, nil
	}
	digest := sha256.Sum256(token)
	return &digest, nil
}

// rulesPassword is PostgreSQL's, "" where its DSN or environment has it.
func (c Config) rulesPassword() (string, error) {
	if c.RulesPasswordFile == "" {
		return "", nil
	}
	data, err := os.ReadFile(c.RulesPasswordFile)
	if err != nil {
		return "", fmt.Errorf("rules-password-file: %w", err)
	}
	return string(bytes.TrimRight(data, "\r\n")), nil
}

// policy reads the policy to begin with, nil where none is configured.
func (c Config) policy() (*policy.Policy, error) {
	if c.PolicyFile == "" {
		return nil, nil
	}
	doc, err := os.ReadFile(c.PolicyFile)
	if err != nil {
		return nil, fmt.Errorf("policy-file: %w", err)
	}
	p, err := policy.Parse(doc)
	if err != nil {
		return nil, fmt.Errorf("policy-file: %s: %w", c.PolicyFile, err)
	}
	return &p, nil
}
