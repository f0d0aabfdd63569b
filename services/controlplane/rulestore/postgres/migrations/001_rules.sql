-- +goose Up
-- Users and, named by their client ids ("ip:..."), addresses with rules of their own.
CREATE TABLE users (
    name    text COLLATE "C" PRIMARY KEY,
    plan    text COLLATE "C" NOT NULL DEFAULT '',
    admin   boolean NOT NULL DEFAULT false,
    block   jsonb,
    created timestamptz NOT NULL DEFAULT now(),
    updated timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX users_by_plan ON users (plan, name);

-- API keys by their SHA-256; the keys themselves are nowhere.
CREATE TABLE api_keys (
    hash      bytea PRIMARY KEY CHECK (length(hash) = 32),
    user_name text COLLATE "C" NOT NULL REFERENCES users ON DELETE CASCADE,
    label     text NOT NULL DEFAULT '',
    created   timestamptz NOT NULL DEFAULT now(),
    expires   timestamptz
);
CREATE INDEX api_keys_by_user ON api_keys (user_name);

-- Limits of one client on a route, or over all routes (''). spec is a policy.Override without those two.
CREATE TABLE overrides (
    user_name text COLLATE "C" NOT NULL REFERENCES users ON DELETE CASCADE,
    route     text COLLATE "C" NOT NULL DEFAULT '',
    spec      jsonb NOT NULL,
    expires   timestamptz,
    PRIMARY KEY (user_name, route)
);

-- Plans that replace the policy's of their names. spec is a policy.Plan.
CREATE TABLE plans (
    name text COLLATE "C" PRIMARY KEY,
    spec jsonb NOT NULL
);

-- What edges have not been told yet. Triggers fill it, whoever changes the tables above; a controlplane
-- publishes and deletes. A thing is the beginning of a key of the rules bucket and a name.
CREATE TABLE rules_changes (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    thing text NOT NULL,
    name  text NOT NULL
);

-- The incarnation of the bucket that all of it was published to.
CREATE TABLE rules_published (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    bucket text NOT NULL
);

-- +goose StatementBegin
CREATE FUNCTION rules_users_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rules_changes (thing, name) SELECT 'user', name FROM changed;
    PERFORM pg_notify('rules_changes', '');
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION rules_keys_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rules_changes (thing, name) SELECT 'key', encode(hash, 'hex') FROM changed;
    INSERT INTO rules_changes (thing, name) SELECT DISTINCT 'user', user_name FROM changed;
    PERFORM pg_notify('rules_changes', '');
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION rules_overrides_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rules_changes (thing, name) SELECT DISTINCT 'user', user_name FROM changed;
    PERFORM pg_notify('rules_changes', '');
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION rules_plans_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rules_changes (thing, name) SELECT 'plan', name FROM changed;
    PERFORM pg_notify('rules_changes', '');
    RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE TRIGGER users_inserted AFTER INSERT ON users REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_users_changed();
CREATE TRIGGER users_updated AFTER UPDATE ON users REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_users_changed();
CREATE TRIGGER users_deleted AFTER DELETE ON users REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_users_changed();
CREATE TRIGGER api_keys_inserted AFTER INSERT ON api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_keys_changed();
CREATE TRIGGER api_keys_updated AFTER UPDATE ON api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_keys_changed();
CREATE TRIGGER api_keys_deleted AFTER DELETE ON api_keys REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_keys_changed();
CREATE TRIGGER overrides_inserted AFTER INSERT ON overrides REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_overrides_changed();
CREATE TRIGGER overrides_updated AFTER UPDATE ON overrides REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_overrides_changed();
CREATE TRIGGER overrides_deleted AFTER DELETE ON overrides REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_overrides_changed();
CREATE TRIGGER plans_inserted AFTER INSERT ON plans REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_plans_changed();
CREATE TRIGGER plans_updated AFTER UPDATE ON plans REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_plans_changed();
CREATE TRIGGER plans_deleted AFTER DELETE ON plans REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rules_plans_changed();

-- +goose Down
DROP TABLE overrides, api_keys, users, plans, rules_changes, rules_published;
DROP FUNCTION rules_users_changed, rules_keys_changed, rules_overrides_changed, rules_plans_changed;
