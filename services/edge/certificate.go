package edge

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// certificateEvery is how old what is known of the certificate's files may be.
const certificateEvery = time.Second

// certificate is the server's, taken anew when its files change. Open connections keep
// the one they began with. Files that make no pair, as in the middle of a replacement,
// leave the last good one in use.
type certificate struct {
	certFile, keyFile string
	log               zerolog.Logger

	mu      sync.Mutex
	checked time.Time
	// cert and key are the files as last read, good or not.
	cert, key []byte
	current   *tls.Certificate
}

func newCertificate(certFile, keyFile string, log zerolog.Logger) (*certificate, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log}
	if err := c.read(); err != nil {
		return nil, err
	}
	c.checked = time.Now()
	return c, nil
}

// get is tls.Config's GetCertificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.checked) >= certificateEvery {
		c.checked = now
		if err := c.read(); err != nil {
			c.log.Error().Err(err).Msg("the changed TLS certificate can't be used; the last good one stays")
		}
	}
	return c.current, nil
}

// read takes the files if they have changed since they were last read.
func (c *certificate) read() error {
	cert, err := os.ReadFile(c.certFile)
	if err != nil {
		return fmt.Errorf("tls-cert-file: %w", err)
	}
	key, err := os.ReadFile(c.keyFile)
	if err != nil {
		return fmt.Errorf("tls-key-file: %w", err)
	}
	if bytes.Equal(cert, c.cert) && bytes.Equal(key, c.key) {
		return nil
	}
	c.cert, c.key = cert, key
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("tls-cert-file %s, tls-key-file %s: %w", c.certFile, c.keyFile, err)
	}
	c.current = &pair
	c.log.Info().Time("not_after", pair.Leaf.NotAfter).Strs("names", pair.Leaf.DNSNames).Msg("TLS certificate in use")
	return nil
}
