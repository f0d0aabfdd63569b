module github.com/aegisrate/aegisrate/e2e

go 1.26.0

require github.com/aegisrate/aegisrate v0.0.0

replace github.com/aegisrate/aegisrate => ..
