package train

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
)

// together is one attempt of all processes to save a step. Each writes what its ranks have into the
// leader's draft, if it sees the folder and may write there: nothing but short messages goes over
// the links. If one does not, the leader is sent the whole state and writes it. All processes
// return the same error: that of the leader, or else of the first process that could not write its
// part. Whatever happens, all of them take part in the same exchanges, in the same order.
func (t *Trainer) together(ctx context.Context, dir string, step int64, m ckpt.Meta,
	src ckpt.Source, o ckpt.Options) error {
	p, s := t.exec.peers, src.(*snapshot)
	o.Needed = bytesOfAll(s)
	d, mark, err := t.draft(ctx, dir, step, m, s, o)
	if mark == "" {
		return err
	}
	if p.Self == 0 {
		defer d.Abort()
	} else {
		d, err = ckpt.Join(dir, step, mark, p.Self, o)
	}
	apart, lost := p.some(ctx, err != nil)
	if lost == nil && !apart { // does the leader see what the others wrote?
		missing := false
		for n := range p.Addresses {
			missing = missing || p.Self == 0 && n > 0 && !d.Joined(n)
		}
		apart, lost = p.some(ctx, missing)
	}
	// write is what the leader does when all others have done their part.
	var write func() error
	switch {
	case lost != nil:
		return lost
	case apart:
		lost = t.exec.collect(ctx, s)
		write = func() error { return d.Write(ctx, 0, s, nil) }
	default:
		write, lost = t.shares(ctx, d, own{s})
	}
	if lost != nil {
		return lost
	}
	err = nil
	if p.Self == 0 {
		if err = write(); err == nil {
			err = d.Whole(s.Tensors())
		}
		if err == nil {
			err = d.Commit(ctx, m)
		}
	}
	done, lost := p.verdicts(ctx, "save ends", err, "")
	if lost != nil {
		return lost
	}
	return done[0].err()
}

// draft has the leader begin a draft, and gives all processes its mark: "" if there is nothing to
// write, or if it cannot be begun, for which the error is the same in all.
func (t *Trainer) draft(ctx context.Context, dir string, step int64, m ckpt.Meta, s *snapshot,
	o ckpt.Options) (d *ckpt.Draft, mark string, err error) {
	p := t.exec.peers
	if p.Self == 0 {
		o.Mark = fmt.Sprintf("%x-%x", os.Getpid(), t.opts.Now().UnixNano())
		d, err = ckpt.Begin(ctx, dir, step, o)
	}
	begun, err := p.verdicts(ctx, "save begins", err, o.Mark)
	if err != nil {
		if d != nil {
			d.Abort()
		}
		return nil, "", err
	}
	if begun[0].Code == diag.CheckpointExists { // is it the one that would be written?
		if err := t.exec.collect(ctx, s); err != nil {
			return nil, "", err
		}
		here := false
		if p.Self == 0 { // if it cannot be read, all are told that it is there
			here, _ = m.Saved(ctx, dir, step, s)
		}
		if same, err := p.some(ctx, here); same || err != nil {
			return nil, "", err
		}
	}
	if err := begun[0].err(); err != nil {
		return nil, "", err
	}
	return d, begun[0].Text, nil
}

// shares has each process write its part of a draft, and gives what the leader does then: it takes
// the others' parts over, or tells why the first of them was not written.
func (t *Trainer) shares(ctx context.Context, d *ckpt.Draft, mine own) (func() error, error) {
	p := t.exec.peers
	sum, err := d.Share(ctx, p.Self, mine)
	all, err := p.verdicts(ctx, "save writes", err, sum)
	return func() error {
		for n, one := range all {
			err := one.err()
			if err == nil && n > 0 {
				err = d.Add(n, one.Text)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}, err
}

// own is what the ranks of this process have of the state.
type own struct{ *snapshot }

// Tensors implements ckpt.Source.
func (o own) Tensors() (list []ckpt.Tensor) {
	for _, pc := range o.pieces {
		if o.homes[pc.rank] != nil {
			list = append(list, pc.tensors...)
		}
	}
	return list
}

// A verdict is how something went in one process, as all are told.
type verdict struct {
	Code                          diag.Code `json:",omitempty"`
	What, Where, Cause, Fix, Text string    `json:",omitempty"`
}

func (v *verdict) err() error {
	if v.Code == "" {
		return nil
	}
	return &diag.Error{Code: v.Code, What: v.What, Where: v.Where, Cause: v.Cause, Fix: v.Fix}
}

// verdicts tells all processes how something went in each, and a text. Errors that say no place
// have that of their process.
func (p *peers) verdicts(ctx context.Context, what string, err error, text string) ([]verdict,
	error) {
	v := verdict{Text: text}
	if e := diag.From(err); e != nil {
		v.Code, v.What, v.Where, v.Cause, v.Fix = e.Code, e.What, e.Where, e.Cause, e.Fix
		if p.Self > 0 {
			v.Where = strings.TrimSpace(fmt.Sprintf("process %d at %s %s", p.Self, p.Addresses[p.Self],
				e.Where))
		}
	}
	mine, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	all, err := p.blobs(ctx, what, mine)
	if err != nil {
		return nil, err
	}
	list := make([]verdict, len(all))
	for n, b := range all {
		if err := json.Unmarshal(b, &list[n]); err != nil {
			return nil, diag.New(diag.LinkShape, "process %d sends no verdict on %q", n, what).Wrap(err)
		}
	}
	return list, nil
}
