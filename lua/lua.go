// Package lua holds the scripts that run inside Redis, by name. Their arithmetic is in lib/,
// shared by all and prepended; each has its twin in Go, named at the script's head, and the
// tests of package redisstore hold the two together.
package lua

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed *.lua lib/*.lua
var files embed.FS

// Clock is the library that tells the time. Tests put another in its place.
//
//go:embed lib/clock.lua
var Clock string

// libraries in the order they build on each other.
var libraries = []string{"clock", "arith", "text", "token", "window", "day", "bucket"}

// Script is the text of the script of that name ("check", "return", "settle", "begin", "incr"), with the shared
// library in front.
func Script(name string) (string, error) {
	var text strings.Builder
	for _, lib := range libraries {
		if err := add(&text, "lib/"+lib); err != nil {
			return "", err
		}
	}
	if err := add(&text, name); err != nil {
		return "", err
	}
	return text.String(), nil
}

func add(text *strings.Builder, name string) error {
	body, err := files.ReadFile(name + ".lua")
	if err != nil {
		return fmt.Errorf("lua: no script %q: %w", name, err)
	}
	text.Write(body)
	return nil
}
