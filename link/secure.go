package link

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"time"

	"github.com/deepwell/deepwell/diag"
)

const (
	// keyInfo separates this use of a secret from all others. A new version is another key.
	keyInfo = "deepwell link ed25519 v1"
	// linkProtocol is what both ends agree on by ALPN, so that no other TLS service that happens to
	// hold the same key is taken for a hub.
	linkProtocol = "deepwell-link"
)

// pinned makes the configuration of both ends of every connection: TLS 1.3, one Ed25519 certificate
// derived from the secret, and nobody else's accepted. The certificate is the same in all
// processes, so that only the secret has to be distributed.
func pinned(secret []byte) (*tls.Config, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, keyInfo, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	public, _ := key.Public().(ed25519.PublicKey)
	template := &x509.Certificate{SerialNumber: big.NewInt(1),
		Subject:   pkix.Name{CommonName: linkProtocol},
		NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)}
	der, err := x509.CreateCertificate(nil, template, template, public, key) // draws no random numbers
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		Certificates:           []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             tls.RequireAnyClientCert,
		InsecureSkipVerify:     true, //nolint:gosec // names prove nothing: the key is compared below
		SessionTicketsDisabled: true,
		NextProtos:             []string{linkProtocol},
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 1 && s.NegotiatedProtocol == linkProtocol &&
				public.Equal(s.PeerCertificates[0].PublicKey) {
				return nil // the handshake has proved that the peer holds the private key
			}
			return errOtherKey
		},
	}, nil
}

var errOtherKey = errors.New("the other end holds another key")

// A secured connection closes at once: Close of TLS may wait seconds for room to say goodbye, which
// frames have done by then.
type secured struct {
	*tls.Conn
	raw net.Conn
}

func (s secured) Close() error { return s.raw.Close() }

// accepted makes the listener's side of a connection, dialed the dialer's side. The caller has set
// a deadline.
func (h *Hub) accepted(raw net.Conn) (net.Conn, error) {
	if h.tls == nil {
		return raw, nil
	}
	return handshake(h.ctx, tls.Server(raw, h.tls), raw)
}

func (h *Hub) dialed(ctx context.Context, raw net.Conn, address string) (net.Conn, error) {
	if h.tls != nil {
		return handshake(ctx, tls.Client(raw, h.tls), raw)
	}
	if at, ok := raw.RemoteAddr().(*net.TCPAddr); !ok || !at.IP.IsLoopback() {
		return nil, unprotected(address)
	}
	return raw, nil
}

func handshake(ctx context.Context, c *tls.Conn, raw net.Conn) (net.Conn, error) {
	err := c.HandshakeContext(ctx)
	if errors.Is(err, errOtherKey) {
		return nil, diag.New(diag.LinkKey, "the other end holds another key").
			Try("give all processes of the run a copy of one --key-file")
	}
	if err != nil {
		return nil, err
	}
	return secured{c, raw}, nil
}

// unprotected refuses to send a model over a network without a key.
func unprotected(address string) error {
	return diag.New(diag.LinkKey, "%s is not on the loopback interface, and there is no key", address).
		Try("head -c 32 /dev/urandom > run.key; chmod 600 run.key; copy it to all hosts;" +
			" --key-file run.key")
}
