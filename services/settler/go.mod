module github.com/aegisrate/aegisrate/services/settler

go 1.26.0

require (
	github.com/aegisrate/aegisrate v0.0.0
	github.com/alecthomas/kong v1.17.0
	github.com/rs/zerolog v1.35.1
)

replace github.com/aegisrate/aegisrate => ../..
