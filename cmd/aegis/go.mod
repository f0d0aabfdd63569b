module github.com/aegisrate/aegisrate/cmd/aegis

go 1.26.0

require (
	github.com/aegisrate/aegisrate v0.0.0
	github.com/aegisrate/aegisrate/services/edge v0.0.0
	github.com/aegisrate/aegisrate/services/settler v0.0.0
	github.com/aegisrate/aegisrate/services/healthwatch v0.0.0
	github.com/aegisrate/aegisrate/services/controlplane v0.0.0
)

replace (
	github.com/aegisrate/aegisrate => ../..
	github.com/aegisrate/aegisrate/services/edge => ../../services/edge
	github.com/aegisrate/aegisrate/services/settler => ../../services/settler
	github.com/aegisrate/aegisrate/services/healthwatch => ../../services/healthwatch
	github.com/aegisrate/aegisrate/services/controlplane => ../../services/controlplane
)
