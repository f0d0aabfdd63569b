// Package policy owns what operators configure: upstreams, routes, plans, users
// and the cluster-wide switches. It parses, sanitises and resolves them; it never
// reads a file or a network.
//
// There are two ways in. Parse and Patch are for administrators: they refuse what
// they do not know and name its path. Receive is for edges: it drops unknown keys
// and counts them, so that an older edge survives a newer document, and refuses
// the rest whole. Compile turns a policy into the Table that requests are decided by.
package policy
