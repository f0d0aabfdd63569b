// Package edge is the stateless gateway replica: it admits requests and proxies them.
package edge
