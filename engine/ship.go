package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/cas"
	"github.com/deepwell/deepwell/program"
)

// A shipment announces a program to the other processes of a client, which take its cache entry in
// chunks from the store.
type shipment struct {
	Key   string // of the cache entry: equal only if engine, GPU, driver and options are
	Bytes int    // of the entry; 0 if it is too large to be sent
	Sum   string // SHA-256 of the entry
	// Code and Error are why there is no program: a GPU that fails is no fault of the program.
	Code  diag.Code `json:",omitempty"`
	Error string    `json:",omitempty"`
}

const (
	// shipChunk is well below what a message of the links may have.
	shipChunk = 8 << 20
	// maxShipped bounds what the store holds of programs: all of one client together, and less than
	// the store takes, since XLA keeps its own keys there. A step of 405B has some ten megabytes.
	maxShipped = 192 << 20
	// shipWait is longer than any compile; a process that is lost ends the wait at once.
	shipWait = 2 * time.Hour
)

// A lead is the process that compiles a program, and one of the program's devices that it has.
type lead struct{ process, index int }

// obtain compiles a program, or gets it from the process that does.
func (e *Engine) obtain(ctx context.Context, b build) (p *obtained, err error) {
	first, apart := e.compiles(b.m.Devices)
	switch {
	case !apart:
		return e.make(b)
	case !e.Has(b.m.Devices[first.index]):
		return e.receive(ctx, b, first.process)
	}
	if p, err = e.make(b); err != nil {
		failed := diag.From(err)
		_ = e.announce(b, shipment{Code: failed.Code, Error: failed.What})
		return nil, err
	}
	return p, e.ship(b, p)
}

// compiles finds the process that compiles a program for all that run it: the one with its first
// device. apart tells whether there are others.
func (e *Engine) compiles(devices program.Devices) (first lead, apart bool) {
	if e.store == nil {
		return first, false
	}
	owner := map[int]int{}
	for _, d := range e.client.Devices() {
		owner[d.ID] = d.Process
	}
	first = lead{owner[devices[0]], 0}
	for i, id := range devices {
		apart = apart || owner[id] != owner[devices[0]]
		if owner[id] < first.process {
			first = lead{owner[id], i}
		}
	}
	return first, apart
}

// shipName is where the store has what processes tell each other about a program.
func shipName(b build) string {
	return "program/" + cas.Key(b.code, fmt.Append(nil, b.m.Devices, b.options.HLO))
}

func (e *Engine) announce(b build, s shipment) error {
	text, err := json.Marshal(s)
	if err == nil {
		err = e.store.Put(shipName(b), text)
	}
	return err
}

// ship gives a program to the other processes, once.
func (e *Engine) ship(b build, p *obtained) error {
	if _, err := e.store.TryGet(shipName(b)); err == nil {
		return nil
	}
	s := shipment{Key: b.key}
	code, err := p.Serialize()
	if err != nil {
		return errors.Join(err, e.announce(b, s))
	}
	entry, err := encodeEntry(p.head, code)
	if err != nil {
		return errors.Join(err, e.announce(b, s))
	}
	// Pipeline ranks have a process each that ships, and share the room.
	room := int64(maxShipped * len(b.m.Devices) / len(e.devices))
	if e.shipped.Add(int64(len(entry))) > room {
		return e.announce(b, s)
	}
	for at := 0; at < len(entry); at += shipChunk {
		chunk := entry[at:min(at+shipChunk, len(entry))]
		if e.store.Put(fmt.Sprintf("%s/%d", shipName(b), at), chunk) != nil {
			return e.announce(b, s) // no room is left: all compile
		}
	}
	sum := sha256.Sum256(entry)
	s.Bytes, s.Sum = len(entry), hex.EncodeToString(sum[:])
	return e.announce(b, s)
}

// receive takes a program that another process compiles: from the own cache, which may be on a file
// system that both see, or from the store. It compiles only what is too large to be sent.
func (e *Engine) receive(ctx context.Context, b build, from int) (*obtained, error) {
	p := &obtained{cached: true}
	load := func(code []byte) error { return p.load(e, b, code) }
	kept := e.cache.unlessDumped(b.options.Flags, e.environ)
	if kept.get(b.key, &p.head, load) {
		return p, nil
	}
	began := time.Now()
	s, err := e.await(ctx, b)
	p.waited = time.Since(began)
	switch {
	case err != nil:
		return nil, diag.New(diag.LinkLost, "%s, which process %d compiles, does not come", b.m.Name,
			from).Wrap(err)
	case s.Error != "":
		return nil, diag.New(cmp.Or(s.Code, diag.CompileFailed), "process %d cannot compile %s: %s", from,
			b.m.Name, s.Error)
	case s.Key != b.key:
		return nil, diag.New(diag.PeersDiffer, "process %d compiles %s with another engine, driver, GPU"+
			" or XLA_FLAGS", from, b.m.Name).Try("install the same release and driver on all hosts")
	case s.Bytes == 0:
		return e.make(b)
	case kept.get(b.key, &p.head, load):
		return p, nil
	}
	entry, err := e.fetch(b, s)
	if err != nil {
		return nil, diag.From(err).At("%s from process %d", b.m.Name, from)
	}
	code, err := decodeEntry(entry, &p.head)
	if err == nil {
		err = load(code)
	}
	if err != nil {
		return nil, err
	}
	p.from = fmt.Sprintf("process %d", from)
	kept.keep(b.key, p.head, func() ([]byte, error) { return code, nil })
	return p, nil
}

// await waits for the announcement of a program.
func (e *Engine) await(ctx context.Context, b build) (s shipment, err error) {
	type answer struct {
		text []byte
		err  error
	}
	come := make(chan answer, 1)
	go func() {
		text, err := e.store.Get(shipName(b), shipWait)
		come <- answer{text, err}
	}()
	select {
	case a := <-come:
		if err = a.err; err == nil {
			err = json.Unmarshal(a.text, &s)
		}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return s, err
}

// fetch takes a program's cache entry from the store, and checks that it is the announced one.
func (e *Engine) fetch(b build, s shipment) ([]byte, error) {
	if s.Bytes < 0 || s.Bytes > maxShipped {
		return nil, diag.New(diag.LinkData, "a program of %d bytes is announced", s.Bytes)
	}
	var entry []byte
	for at := 0; at < s.Bytes; at += shipChunk {
		chunk, err := e.store.TryGet(fmt.Sprintf("%s/%d", shipName(b), at))
		if err != nil {
			return nil, diag.New(diag.LinkData, "a chunk of a program is missing").Wrap(err)
		}
		entry = append(entry, chunk...)
	}
	if sum := sha256.Sum256(entry); len(entry) != s.Bytes || hex.EncodeToString(sum[:]) != s.Sum {
		return nil, diag.New(diag.LinkData, "a program arrives damaged: %d bytes of %d", len(entry),
			s.Bytes)
	}
	return entry, nil
}
