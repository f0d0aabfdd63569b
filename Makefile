# `make help` lists the targets. Everything runs from the root of the checkout.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# Arguments of `make run`, for instance: make run ARGS='--edge-addr 127.0.0.1:9000'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help build schema run test race lint fuzz soak bench e2e openai images up down clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build static binaries of the four services and of aegis into bin/
	@VERSION=$(VERSION) scripts/binaries.sh
	@ls -1 bin/edge bin/settler bin/healthwatch bin/controlplane bin/aegis

schema: ## Make deploy/policy.schema.json from the policy's types
	@go run ./cmd/aegis policy schema > deploy/policy.schema.json.tmp
	@mv deploy/policy.schema.json.tmp deploy/policy.schema.json

run: ## Run everything in one process: edge on :8080, controlplane on :8090, NATS on :4222 (ARGS='...')
	@mkdir -p bin
	@CGO_ENABLED=0 go build -ldflags '-X main.version=$(VERSION)' -o bin/aegis ./cmd/aegis
	@exec bin/aegis up $(ARGS)

test: ## Run the tests of every module but e2e, on a real Redis (no Docker needed)
	@scripts/test.sh

race: ## Run them with the race detector, where goroutines meet
	@scripts/test.sh race

lint: ## Formatting, vet, staticcheck, tidy modules, import rules, Lua, shell
	@scripts/lint.sh

fuzz: ## Run each fuzz target for FUZZTIME (10s)
	@scripts/fuzz.sh

soak: ## Hold the stores and the exact model together over 1,000,000 random steps, send 10 GiB through an edge, run fleets for a minute (about 40 minutes)
	@scripts/redis.sh
	@go test -count=1 -timeout=3h -run='^TestSequence$$' ./pkg/bucket/store/redisstore -steps=50000
	@go test -count=1 -timeout=1h -run='^TestUpStreamsHugeBody$$' -v ./cmd/aegis -huge=10240
	@cd services/edge && go test -count=1 -timeout=30m -tags=soak -v -run='^(TestCardinalityAttackOfFiveMillion|TestFleetOfProcessesForAMinute|TestSlowLoris5000)$$' . ./admission
	@scripts/postgres.sh
	@cd services/controlplane && go test -count=1 -timeout=30m -tags=soak -v -run='^TestMillionUsers$$' ./rulestore/postgres

bench: ## Run the benchmarks COUNT (6) times into .cache/bench.out, for benchstat
	@scripts/bench.sh

e2e: ## Test the whole stack in containers (needs Docker)
	@scripts/e2e.sh

openai: ## Try LLM routes with a stock client, openai-go, on a whole stack in one process (in make test too)
	@scripts/redis.sh
	@go test -count=1 -v ./e2e/openai

images: ## Make the container images; base images that can't be pulled are made too
	@scripts/images.sh

up: ## Start the stack in containers (docker compose)
	@scripts/images.sh
	@scripts/compose.sh -f deploy/compose.yaml up -d --build --wait

down: ## Stop it and delete its volumes
	@scripts/compose.sh -f deploy/compose.yaml down -v

clean: ## Delete what was built; data/ stays
	@rm -rf bin .cache
