package link

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// A storeCall is one call: an identifier, which its answer has too, 64 bits; the operation, a byte;
// the timeout in nanoseconds, 64 bits; the length of the key, 32 bits; the key, and the value.
type storeCall struct {
	id      uint64
	op      byte
	timeout time.Duration
	key     string
	value   []byte
}

// head is a call without its value.
func (c storeCall) head() []byte {
	b := binary.LittleEndian.AppendUint64(nil, c.id)
	b = append(b, c.op)
	b = binary.LittleEndian.AppendUint64(b, uint64(max(0, c.timeout)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.key)))
	return append(b, c.key...)
}

func parseStoreCall(b []byte) (c storeCall, ok bool) {
	const head = 8 + 1 + 8 + 4
	if len(b) < head {
		return c, false
	}
	c.id, c.op = binary.LittleEndian.Uint64(b), b[8]
	c.timeout = time.Duration(binary.LittleEndian.Uint64(b[9:]) & (1<<63 - 1))
	n := binary.LittleEndian.Uint32(b[17:])
	b = b[head:]
	if c.op > storePut || n > maxStoreKey || int(n) > len(b) || len(b)-int(n) > maxStoreValue {
		return c, false
	}
	c.key = string(b[:n])
	if c.op == storePut {
		c.value = b[n:]
	}
	return c, c.op == storePut || int(n) == len(b)
}

// A storeReply is the answer to a call: its identifier, the outcome, a byte, and the value or the
// text of an error.
type storeReply struct {
	id    uint64
	value []byte
	err   error
}

// head is an answer without its body.
func (r storeReply) head() []byte {
	outcome := storeFailed
	switch {
	case r.err == nil:
		outcome = storeDone
	case errors.Is(r.err, fs.ErrNotExist):
		outcome = storeMissing
	case errors.Is(r.err, context.DeadlineExceeded):
		outcome = storeLate
	}
	return append(binary.LittleEndian.AppendUint64(nil, r.id), outcome)
}

func (r storeReply) body() []byte {
	if r.err == nil {
		return r.value
	}
	if r.head()[8] != storeFailed {
		return nil
	}
	text := r.err.Error()
	return []byte(text[:min(len(text), maxText)])
}

func parseStoreReply(b []byte) (r storeReply, ok bool) {
	if len(b) < 9 {
		return r, false
	}
	r.id = binary.LittleEndian.Uint64(b)
	switch rest := b[9:]; b[8] {
	case storeDone:
		r.value = rest
	case storeMissing:
		r.err = fs.ErrNotExist
	case storeLate:
		r.err = context.DeadlineExceeded
	case storeFailed:
		r.err = diag.New(diag.LinkData, "the store of the run answers: %q", rest)
	default:
		return r, false
	}
	return r, true
}
