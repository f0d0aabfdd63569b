package proxy

import (
	"net/http"
	"strings"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// What net/http takes from a client and would refuse to send on, or would send on as something else than was
// decided on, is refused or dropped here. It would pass for a failure of the upstream, which is paid back
// and lowers M for everyone.

const (
	alphanumeric = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	tokenBytes   = "!#$%&'*+-.^_`|~" + alphanumeric
	hostBytes    = "!$%&'()*+,-.:;=[]_~" + alphanumeric
)

func isToken(s string) bool { return s != "" && strings.Trim(s, tokenBytes) == "" }

// passable says whether a request's target is a path on a host. "x:http://host/y" is not: it has no path to find a route
// by, and the upstream would get what is behind the first colon.
func passable(r *http.Request) bool {
	u := r.URL
	return u.Opaque == "" && (u.Path == "" || u.Path[0] == '/') && strings.Trim(r.Host, hostBytes) == ""
}

// mayUpgrade says whether the upstream is asked for the protocol; else the request goes on without, as any server may
// choose. HTTP in any version is not asked for, since what follows would be requests that nobody counts.
// HTTP/2 has no upgrades; by TLS it may be what the upstream speaks, except to WebSockets.
func mayUpgrade(protocol string, d *admission.Decision) bool {
	name, version, versioned := strings.Cut(strings.ToLower(protocol), "/")
	if !isToken(name) || versioned && !isToken(version) || d.Upstream.Connections.HTTP2 {
		return false
	}
	switch name {
	case "websocket":
		return true
	case "h2c", "h2", "http", "tls":
		return false
	}
	for _, u := range d.Upstream.URLs {
		if u.Scheme == "https" {
			return false
		}
	}
	return true
}

// forwarding says whether a header tells of proxies before this one. Many upstreams take a "_" for a "-".
func forwarding(name string) bool {
	const forwarded, realIP = "X-Forwarded", "X-Real-Ip"
	if len(name) < len(realIP) || name[0] != 'X' {
		return name == "Forwarded"
	}
	name = strings.ReplaceAll(name, "_", "-")
	return strings.EqualFold(name, realIP) || len(name) >= len(forwarded) && strings.EqualFold(name[:len(forwarded)], forwarded)
}
