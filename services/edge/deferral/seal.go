package deferral

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
)

// sealer encrypts what is stored; a nil one leaves it as it is.
type sealer struct{ aead cipher.AEAD }

func newSealer(secret []byte) (*sealer, error) {
	if len(secret) == 0 {
		return nil, nil
	}
	key, err := hkdf.Key(sha256.New, secret, nil, "aegisrate deferred requests v1", 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, err
	}
	return &sealer{aead}, nil
}

var errSealed = errors.New("it was sealed by another secret")

// seal gives the stored form of v, which belongs to what: the kind and the id.
func (s *sealer) seal(v any, what string) (data []byte, sealed bool, err error) {
	data, err = json.Marshal(v)
	if err != nil || s == nil {
		return data, false, err
	}
	return s.aead.Seal(nil, nil, data, []byte(what)), true, nil
}

// open reads what seal gave, into v.
func (s *sealer) open(data []byte, sealed bool, what string, v any) error {
	if sealed {
		if s == nil {
			return errSealed
		}
		plain, err := s.aead.Open(nil, nil, data, []byte(what))
		if err != nil {
			return errSealed
		}
		data = plain
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("stored form of a deferred request: %w", err)
	}
	return nil
}
