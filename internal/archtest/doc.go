// Package archtest holds the import rules of the workspace and the check that
// every source file keeps them. Its test runs the check over the whole tree and
// over small planted trees, one for each rule, so that no rule can rot unseen.
//
// The check reads source text only: it needs neither the network nor a build.
package archtest
