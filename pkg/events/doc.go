// Package events owns what AegisRate's services say to each other: the NATS
// subjects and streams, and the wire form of every message on them.
//
// One event stands in one file. Every message is a JSON object whose "type"
// field carries a name and a version, such as "aegis.response.v1"; a reader
// refuses a type that it does not know (ErrType), so that a message is never
// half understood. Golden wire forms are in testdata.
//
// The package imports neither NATS nor Redis nor HTTP: package bus moves these
// messages, package store holds what they change.
package events
