// Package lifecycle starts the parts of a program in order and stops them in
// reverse, each within a bound.
//
// List what is depended on first: the bus before the outbox, the outbox before
// what fills it. What produces then stops before what it produces into.
package lifecycle
