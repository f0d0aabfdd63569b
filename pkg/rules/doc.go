// Package rules is what is known of single clients: users with their API keys, and addresses with
// limits of their own. It grows with customers, so it does not travel whole as the policy does: it
// lies in the KV bucket AEGIS_RULES, where an edge looks a client up when it first sees it.
//
//	user.<name>      a User, whole: plan, keys, overrides, block
//	address.<addr>   a User named by its client id; few, and edges follow all of them
//	key.<hash>       the name of the user that may have a key of this SHA-256
//	plan.<name>      a policy.Plan that replaces the policy's of that name
//
// A User is the truth and is stored in one step; key.<hash> only says where to look, and counts when
// the User lists that key. A KV delete marker stands for what is gone.
package rules
