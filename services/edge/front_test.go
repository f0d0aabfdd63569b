package edge_test

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/services/edge"
)

// startFor runs an edge whose only route, /api, goes to url.
func startFor(t *testing.T, url string, change func(*edge.Config)) *rig {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.json")
	write(t, file, encode(t, policyFor(t, url, 1000)))
	return start(t, edge.Deps{Bus: bustest.Start(t).Bus(t), Store: memstore.New(nil)}, func(c *edge.Config) {
		c.PolicyFile = file
		change(c)
	})
}

func write(t *testing.T, file string, data []byte) {
	t.Helper()
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// pair is a certificate for 127.0.0.1 that signs itself, and its key.
func pair(t *testing.T, serial int64) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "edge"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
}

// A changed certificate is shown to new connections, files that make no pair are not, and no
// open connection notices: here an HTTP/2 one with an answer under way.
func TestCertificateChanges(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Header.Get("X-Forwarded-Proto"))
		if r.URL.Path == "/api/long" {
			http.NewResponseController(w).Flush()
			<-next
			io.WriteString(w, " done")
		}
	}))
	t.Cleanup(s.Close)
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	cert, key := pair(t, 1)
	write(t, certFile, cert)
	write(t, keyFile, key)
	r := startFor(t, s.URL, func(c *edge.Config) { c.TLSCertFile, c.TLSKeyFile = certFile, keyFile })
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cert)
	newClient := func() *http.Client {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr, Timeout: 20 * time.Second}
	}
	url := "https://" + r.service.Addr()
	// serial asks over the connections of c and gives the number of the certificate they began with.
	serial := func(c *http.Client) int64 {
		t.Helper()
		res, err := c.Get(url + "/api")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); err != nil || string(body) != "https" || res.ProtoMajor != 2 {
			t.Fatalf("%s %s: %q, %v", res.Proto, res.Status, body, err)
		}
		return res.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	old := newClient()
	if n := serial(old); n != 1 {
		t.Fatalf("certificate %d", n)
	}
	long, err := old.Get(url + "/api/long")
	if err != nil {
		t.Fatal(err)
	}
	defer long.Body.Close()

	second, secondKey := pair(t, 2)
	roots.AppendCertsFromPEM(second)
	write(t, certFile, second) // and not yet its key
	time.Sleep(1100 * time.Millisecond)
	if n := serial(newClient()); n != 1 {
		t.Errorf("certificate %d with another's key", n)
	}
	write(t, keyFile, secondKey)
	bustest.Await(t, "the second certificate", func() bool { return serial(newClient()) == 2 })
	if err := os.Remove(keyFile); err != nil {
		t.Fatal(err)
	}
	time.Sleep(1100 * time.Millisecond)
	if n := serial(newClient()); n != 2 {
		t.Errorf("certificate %d after its key was removed", n)
	}

	if n := serial(old); n != 1 {
		t.Errorf("the open connection was replaced by one with certificate %d", n)
	}
	close(next)
	if body, err := io.ReadAll(long.Body); err != nil || string(body) != "https done" {
		t.Errorf("the answer under way: %q, %v", body, err)
	}
	// HTTP/1.1 is spoken to those who ask for it.
	one := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, NextProtos: []string{"http/1.1"}}, DisableKeepAlives: true}}
	res, err := one.Get(url + "/api")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "https" || res.ProtoMajor != 1 || res.TLS.PeerCertificates[0].SerialNumber.Int64() != 2 {
		t.Errorf("asked for HTTP/1.1, got %s %q with certificate %d, %v", res.Proto, body, res.TLS.PeerCertificates[0].SerialNumber, err)
	}
}

// Smuggling: what could be framed in two ways is refused by the real edge, with TLS and without.
func TestSmugglingIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	cert, key := pair(t, 1)
	write(t, certFile, cert)
	write(t, keyFile, key)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cert)
	url := backend(t)
	for name, secure := range map[string]*tls.Config{"plain": nil, "TLS": {RootCAs: roots, ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"}}} {
		r := startFor(t, url, func(c *edge.Config) {
			if secure != nil {
				c.TLSCertFile, c.TLSKeyFile = certFile, keyFile
			}
		})
		for _, sent := range []string{
			"GET /api HTTP/1.1\nHost: x\r\n\r\n",
			"POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		} {
			conn, err := net.Dial("tcp", r.service.Addr())
			if err != nil {
				t.Fatal(err)
			}
			if secure != nil {
				conn = tls.Client(conn, secure)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			io.WriteString(conn, sent)
			if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != http.StatusBadRequest || !res.Close {
				t.Errorf("%s, %q: %+v, %v", name, sent, res, err)
			}
		}
		if n := r.metric("aegis_edge_requests_total"); n != 0 {
			t.Errorf("%s: %v requests were decided", name, n)
		}
	}
}

func TestUnusableCertificateIsAnError(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, _ := pair(t, 1)
	_, key := pair(t, 2)
	write(t, filepath.Join(dir, "cert.pem"), cert)
	write(t, filepath.Join(dir, "key.pem"), key)
	cfg := edge.DefaultConfig()
	cfg.Addr, cfg.DataDir = "127.0.0.1:0", dir
	cfg.TLSCertFile, cfg.TLSKeyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if _, err := edge.New(cfg, edge.Deps{Bus: bustest.Start(t).Bus(t), Store: memstore.New(nil), Registry: newRegistry()}); err == nil || !strings.Contains(err.Error(), "tls-cert-file") {
		t.Errorf("another certificate's key: %v", err)
	}
}

func TestH2C(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		r := startFor(t, backend(t), func(c *edge.Config) { c.H2C = on })
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetUnencryptedHTTP2(true)
		t.Cleanup(tr.CloseIdleConnections)
		res, err := (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Get(r.url + "/api")
		if on && (err != nil || res.ProtoMajor != 2 || res.StatusCode != 200 || res.Header.Get("RateLimit-Limit") != "1000") {
			t.Errorf("%+v, %v", res, err)
		}
		if !on && err == nil {
			t.Errorf("HTTP/2 without TLS, though it is not on: %s", res.Status)
		}
		if err == nil {
			res.Body.Close()
		}
		if res := r.get("/api"); res.ProtoMajor != 1 || res.StatusCode != 200 {
			t.Errorf("HTTP/1.1 beside it: %s %s", res.Proto, res.Status)
		}
	}
}

// The PROXY protocol names the client where a trusted proxy speaks, which then has to. Others
// can't name anyone by it.
func TestProxyProtocol(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Header.Get("X-Forwarded-For"))
	}))
	t.Cleanup(s.Close)
	client4 := &net.TCPAddr{IP: net.ParseIP("203.0.113.9"), Port: 4321}
	client6 := &net.TCPAddr{IP: net.ParseIP("2001:db8::9"), Port: 4321}
	local := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	local6 := &net.TCPAddr{IP: net.IPv6loopback, Port: 80}
	header := func(version byte, from, to net.Addr) string {
		var b bytes.Buffer
		if _, err := proxyproto.HeaderProxyFromAddrs(version, from, to).WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	health := "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00" // v2 LOCAL: the proxy speaks for itself
	trusting := startFor(t, s.URL, func(c *edge.Config) {
		c.ProxyProtocol, c.TrustedProxies = true, []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	})
	wary := startFor(t, s.URL, func(c *edge.Config) {
		c.ProxyProtocol, c.TrustedProxies = true, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	})
	for _, test := range []struct {
		name   string
		edge   *rig
		sent   string
		status int // 0: no answer
		seen   string
	}{
		{"v2", trusting, header(2, client4, local), 200, "203.0.113.9"},
		{"v2 of IPv6", trusting, header(2, client6, local6), 200, "2001:db8::9"},
		{"v1", trusting, header(1, client4, local), 200, "203.0.113.9"},
		{"a proxy's own check", trusting, health, 200, "9.9.9.9, 127.0.0.1"}, // its X-Forwarded-For counts
		{"no header from a trusted proxy", trusting, "", 0, ""},
		{"a header from a stranger", wary, header(2, client4, local), 400, ""},
		{"none from a stranger", wary, "", 200, "127.0.0.1"},
	} {
		conn, err := net.Dial("tcp", test.edge.service.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(conn, test.sent+"GET /api HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 9.9.9.9\r\nConnection: close\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if test.status == 0 {
			if err == nil && res.StatusCode == 200 {
				t.Errorf("%s: %s", test.name, res.Status)
			}
			continue
		}
		if err != nil || res.StatusCode != test.status {
			t.Errorf("%s: %+v, %v", test.name, res, err)
			continue
		}
		if body, _ := io.ReadAll(res.Body); test.seen != "" && string(body) != test.seen {
			t.Errorf("%s: the upstream heard of %q, want %q", test.name, body, test.seen)
		}
	}
}
