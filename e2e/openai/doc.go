// Package openai runs a stock client, openai-go, against a whole stack in this process with the sample
// upstream. It is a module of its own, so that the client is in no other's go.mod.
package openai
