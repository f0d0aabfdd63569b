package edge

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"

	"github.com/aegisrate/aegisrate/services/edge/proxy"
)

// Config is how an edge behaves; the tags are kong's.
type Config struct {
	ID              string         `name:"id" env:"AEGIS_EDGE_ID" help:"Name of this replica, of a-z, 0-9, _ and -; default: the host name."`
	Addr            string         `name:"addr" env:"AEGIS_EDGE_ADDR" default:"127.0.0.1:8080" help:"Where clients are served."`
	DataDir         string         `name:"data-dir" env:"AEGIS_EDGE_DATA_DIR" default:"data/edge" type:"path" help:"Where the last good policy is kept for a start without NATS, and finished requests until NATS has them; each edge needs its own."`
	PolicyFile      string         `name:"policy-file" env:"AEGIS_EDGE_POLICY_FILE" type:"path" help:"Policy for a start with neither NATS nor a kept policy."`
	TrustedProxies  []netip.Prefix `name:"trusted-proxies" env:"AEGIS_EDGE_TRUSTED_PROXIES" help:"Networks whose X-Forwarded-For counts, such as 10.0.0.0/8,fd00::/8; default: none."`
	IPv6Prefix      int            `name:"ipv6-prefix" env:"AEGIS_EDGE_IPV6_PREFIX" default:"64" help:"Length of the prefix that IPv6 clients without a key are counted by."`
	H2C             bool           `name:"h2c" env:"AEGIS_EDGE_H2C" help:"Serve HTTP/2 without TLS too, to clients that know of it."`
	TLSCertFile     string         `name:"tls-cert-file" env:"AEGIS_EDGE_TLS_CERT_FILE" type:"path" help:"Certificate chain (PEM) to serve HTTPS and HTTP/2 by; read again when it changes. Default: no TLS."`
	TLSKeyFile      string         `name:"tls-key-file" env:"AEGIS_EDGE_TLS_KEY_FILE" type:"path" help:"Its private key (PEM)."`
	ProxyProtocol   bool           `name:"proxy-protocol" env:"AEGIS_EDGE_PROXY_PROTOCOL" help:"Take the client's address from the PROXY protocol header (v1 or v2) that each trusted proxy must then send."`
	ConfigPublicKey string         `name:"config-public-key" env:"AEGIS_CONFIG_PUBLIC_KEY" help:"Obey only versions of the policy that the controlplane has signed by the key that this belongs to (aegis policy public-key)."`
	RulesRefresh    time.Duration  `name:"rules-refresh" env:"AEGIS_EDGE_RULES_REFRESH" default:"5m" help:"How old what is known of a client may be before it is looked up again; changes are pushed besides."`
	RulesTimeout    time.Duration  `name:"rules-timeout" env:"AEGIS_EDGE_RULES_TIMEOUT" default:"100ms" help:"How long a request with a key that was never seen may wait until it is looked up."`
	MaxUsers        int            `name:"max-users" env:"AEGIS_EDGE_MAX_USERS" default:"100000" help:"Keys of the rules that are remembered, in memory and on disk."`
	BodyTimeout     time.Duration  `name:"body-timeout" env:"AEGIS_EDGE_BODY_TIMEOUT" default:"30s" help:"How long a client may send nothing of a body that the upstream waits for, before it gets 408."`
	AccessLog       uint32         `name:"access-log" env:"AEGIS_EDGE_ACCESS_LOG" default:"0" help:"Log one request in so many; 0: none."`
	MaxQueued       int            `name:"max-queued" env:"AEGIS_EDGE_MAX_QUEUED" default:"100000" help:"Finished requests that may wait for NATS in memory, where the spool has no room for them; what exceeds it is lost, counted and alarmed."`
	SpoolBytes      int64          `name:"spool-bytes" env:"AEGIS_EDGE_SPOOL_BYTES" default:"268435456" help:"Bound of what waits for NATS on disk, in the data directory, in bytes; 0: nothing is kept there."`
	CacheBytes      int64          `name:"cache-bytes" env:"AEGIS_EDGE_CACHE_BYTES" default:"67108864" help:"Bound of the stored answers that yellow requests get on routes with degrade: cache, in bytes; 0: none are stored."`
	SecretFile      string         `name:"secret-file" env:"AEGIS_EDGE_SECRET_FILE" type:"path" help:"File with a secret, the same for every edge, that encrypts deferred requests and their answers in NATS; default: only the permissions of NATS keep them."`
	WriteTimeout    time.Duration  `name:"write-timeout" env:"AEGIS_EDGE_WRITE_TIMEOUT" default:"30s" help:"How long a client may leave a part of its answer unread before its connection ends."`
	DrainWait       time.Duration  `name:"drain-wait" env:"AEGIS_EDGE_DRAIN_WAIT" default:"0s" help:"On shutdown, how long to serve on while not ready, so that load balancers turn away."`
	DrainTimeout    time.Duration  `name:"drain-timeout" env:"AEGIS_EDGE_DRAIN_TIMEOUT" default:"15s" help:"On shutdown, how long requests under way may take."`
	FlushTimeout    time.Duration  `name:"flush-timeout" env:"AEGIS_EDGE_FLUSH_TIMEOUT" default:"5s" help:"On shutdown, how long to try publishing what is queued."`
}

// DefaultConfig is what the flags default to.
func DefaultConfig() Config {
	return Config{
		Addr:         "127.0.0.1:8080",
		DataDir:      "data/edge",
		IPv6Prefix:   64,
		RulesRefresh: 5 * time.Minute,
		RulesTimeout: 100 * time.Millisecond,
		MaxUsers:     100_000,
		BodyTimeout:  proxy.DefaultBodyTimeout,
		MaxQueued:    100_000,
		SpoolBytes:   256 << 20,
		CacheBytes:   64 << 20,
		WriteTimeout: 30 * time.Second,
		DrainTimeout: 15 * time.Second,
		FlushTimeout: 5 * time.Second,
	}
}

var validID = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// Validate reports the first setting that can't work.
func (c Config) Validate() error {
	switch {
	case c.ID != "" && !validID.MatchString(c.ID):
		return fmt.Errorf("id %q: want 1 to 63 of a-z, 0-9, _ and -", c.ID)
	case c.Addr == "":
		return errors.New("addr: must be set, for instance 127.0.0.1:8080")
	case c.DataDir == "":
		return errors.New("data-dir: must be set")
	case c.IPv6Prefix < 16 || c.IPv6Prefix > 128:
		return fmt.Errorf("ipv6-prefix %d: want 16 to 128", c.IPv6Prefix)
	case c.BodyTimeout <= 0:
		return fmt.Errorf("body-timeout %s: want more than 0", c.BodyTimeout)
	case c.MaxQueued < 1:
		return fmt.Errorf("max-queued %d: want 1 or more", c.MaxQueued)
	case c.SpoolBytes < 0:
		return fmt.Errorf("spool-bytes %d: must not be negative", c.SpoolBytes)
	case c.WriteTimeout <= 0:
		return fmt.Errorf("write-timeout %v: must be above 0", c.WriteTimeout)
	case c.CacheBytes < 0:
		return fmt.Errorf("cache-bytes %d: must not be negative", c.CacheBytes)
	case errPublicKey(c.ConfigPublicKey) != nil:
		return fmt.Errorf("config-public-key: %w", errPublicKey(c.ConfigPublicKey))
	case c.RulesRefresh < time.Second || c.RulesTimeout <= 0 || c.MaxUsers < 1:
		return errors.New("rules-refresh, rules-timeout, max-users: want at least 1s, above 0, and 1")
	case c.DrainWait < 0 || c.DrainTimeout < 0 || c.FlushTimeout < 0:
		return errors.New("drain-wait, drain-timeout, flush-timeout: must not be negative")
	}
	switch {
	case (c.TLSCertFile == "") != (c.TLSKeyFile == ""):
		return errors.New("tls-cert-file, tls-key-file: set both or neither")
	case c.ProxyProtocol && len(c.TrustedProxies) == 0:
		return errors.New("proxy-protocol: name the proxies that send it in trusted-proxies")
	}
	for _, p := range c.TrustedProxies {
		if p != p.Masked() {
			return fmt.Errorf("trusted-proxies: %s has bits beyond its prefix; write %s", p, p.Masked())
		}
	}
	return nil
}

// withID is c with an id: the host's name where it has none, made a token of a NATS subject.
func (c Config) withID() (Config, error) {
	if c.ID != "" {
		return c, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return c, fmt.Errorf("id: not set, and the host has no name: %w", err)
	}
	c.ID = cmp.Or(idOf(host), "edge")
	return c, nil
}

func idOf(host string) string {
	id := []byte(strings.ToLower(host))
	for i, c := range id {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			id[i] = '-'
		}
	}
	id = []byte(strings.Trim(string(id), "-_"))
	return string(id[:min(len(id), 63)])
}

// secret is what SecretFile holds, nil without one.
func (c Config) secret() ([]byte, error) {
	if c.SecretFile == "" {
		return nil, nil
	}
	secret, err := os.ReadFile(c.SecretFile)
	if err != nil {
		return nil, fmt.Errorf("secret-file: %w", err)
	}
	if secret = bytes.TrimSpace(secret); len(secret) < 16 {
		return nil, errors.New("secret-file: it has less than 16 bytes")
	}
	return secret, nil
}

// StopTimeout bounds how long Run takes after its context ends.
func (c Config) StopTimeout() time.Duration {
	return c.DrainWait + c.DrainTimeout + c.FlushTimeout + 6*closeTimeout
}

func errPublicKey(text string) error {
	_, err := events.ParsePublicKey(text)
	return err
}
