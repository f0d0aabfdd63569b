// Package storetest is what every store.Store must do: a conformance suite on the store's own
// clock (Run), text scenarios on a clock that the test sets (Scenarios), and long seeded
// sequences that hold two stores and an exact model together (Sequence).
package storetest
