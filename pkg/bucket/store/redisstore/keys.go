package redisstore

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// formatVersion is written into a shard's meta when it begins. Another version there is refused.
const formatVersion = 1

// maxPart is the length to which a scope or a client id is readable in a key; what is longer is hashed.
const maxPart = 64

// bucketKey names a client's bucket. The hash tag is the client's shard, so that all of a
// client's buckets share a slot.
//
//	ratelimit:tb:{<shard>}:<scope>:<id>
//	ratelimit:sw:{<shard>}:<scope>:<id>
//	ratelimit:day:{<shard>}:<id>
func bucketKey(kind bucket.Kind, scope, client string) string {
	tag := hashTag(store.ShardOf(client))
	switch kind {
	case bucket.SlidingWindow:
		return "ratelimit:sw:" + tag + ":" + keyPart(scope, "") + ":" + keyPart(client, idPlain)
	case bucket.DailyQuota:
		return "ratelimit:day:" + tag + ":" + keyPart(client, idPlain)
	default:
		return "ratelimit:tb:" + tag + ":" + keyPart(scope, "") + ":" + keyPart(client, idPlain)
	}
}

// appendBucketKeys adds the keys a bucket may be under: its kind's, then, for kinds that
// can be switched, the other's.
func appendBucketKeys(keys []string, kind bucket.Kind, scope, client string) []string {
	keys = append(keys, bucketKey(kind, scope, client))
	switch kind {
	case bucket.TokenBucket:
		keys = append(keys, bucketKey(bucket.SlidingWindow, scope, client))
	case bucket.SlidingWindow:
		keys = append(keys, bucketKey(bucket.TokenBucket, scope, client))
	}
	return keys
}

// metaKey names a shard's settlement state.
func metaKey(shard int) string { return "ratelimit:meta:" + hashTag(shard) }

func hashTag(shard int) string { return "{" + strconv.Itoa(shard) + "}" }

// idPlain are bytes that an id may keep, as it is a key's last part and nothing after it is to be told
// apart: addresses stay short and readable.
const idPlain = ":/"

// keyPart makes any bytes a part of a key, so that distinct parts stay distinct: bytes that are not
// letters, digits, one of "-_.@" or of plain are written as %XX, and what would then be longer
// than maxPart is replaced by "~" and its SHA-256 in base64. No part contains a brace.
func keyPart(part, plain string) string {
	const hex = "0123456789ABCDEF"
	escapes := 0
	for i := range len(part) {
		if !isPlain(part[i], plain) {
			escapes++
		}
	}
	switch {
	case len(part)+2*escapes > maxPart:
		sum := sha256.Sum256([]byte(part))
		return "~" + base64.RawURLEncoding.EncodeToString(sum[:])
	case escapes == 0:
		return part
	}
	var b strings.Builder
	for i := range len(part) {
		if c := part[i]; isPlain(c, plain) {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}

func isPlain(c byte, plain string) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		c == '-' || c == '_' || c == '.' || c == '@' || strings.IndexByte(plain, c) >= 0
}
