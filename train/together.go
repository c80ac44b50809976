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

// together is one attempt of all processes to save a step.
//
// Each process writes the tensors of its ranks into the leader's draft, if it sees the leader's
// folder (a shared file system) and may write there; then only short messages travel. If any
// process does not, the leader collects the whole state and writes it alone.
//
// All processes return the same error: the leader's, or the one of the first process that could not
// write its share. Whatever fails, all of them take part in the same exchanges in the same order,
// so that none is left waiting.
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
	// Two votes: has every process opened the draft, and does the leader see what they made? A folder
	// of the same name on a local disk passes the first only.
	apart, lost := p.any(ctx, err != nil)
	if lost == nil && !apart { // does the leader see what the others wrote?
		missing := false
		for n := range p.Addresses {
			missing = missing || p.Self == 0 && n > 0 && !d.Joined(n)
		}
		apart, lost = p.any(ctx, missing)
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
		write, lost = t.shares(ctx, d, ownShards{s})
	}
	if lost != nil {
		return lost
	}
	// The leader commits only if every tensor of the state is there.
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

// draft lets the leader begin a draft and gives its mark to all processes. The mark is "" if there
// is nothing to write, or if the draft cannot be begun; the error is then the same in all.
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
		if same, err := t.alreadySaved(ctx, dir, step, m, s); same || err != nil {
			return nil, "", err
		}
	}
	if err := begun[0].err(); err != nil {
		return nil, "", err
	}
	return d, begun[0].Text, nil
}

// alreadySaved reports whether a checkpoint that exists has the state of all processes; if it can
// not be read, it does not. Where processes share one client, each compares its own slices.
func (t *Trainer) alreadySaved(ctx context.Context, dir string, step int64, m ckpt.Meta,
	s *snapshot) (bool, error) {
	p := t.exec.peers
	if s.sliced {
		here, _ := m.Saved(ctx, dir, step, s, s.slices())
		differs, err := p.any(ctx, !here)
		return !differs && err == nil, err
	}
	if err := t.exec.collect(ctx, s); err != nil {
		return false, err
	}
	here := false
	if p.Self == 0 {
		here, _ = m.Saved(ctx, dir, step, s, nil)
	}
	return p.any(ctx, here)
}

// shares lets each process write its share of a draft. It returns what the leader does afterwards:
// adopt the others' shares, or report why the first of them was not written.
func (t *Trainer) shares(ctx context.Context, d *ckpt.Draft, mine ownShards) (func() error, error) {
	// The checksum of a share tells the leader that it reads what was written, on a file system that
	// may lag.
	p := t.exec.peers
	var list []ckpt.Slice
	if mine.sliced {
		list = mine.slices()
	}
	sum, err := d.Share(ctx, p.Self, mine, list)
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

// ownShards is a [ckpt.Source] of the tensors that this process has.
type ownShards struct{ *snapshot }

// Tensors implements ckpt.Source.
func (o ownShards) Tensors() (list []ckpt.Tensor) {
	for _, pc := range o.arrays {
		if o.shards[pc.rank] != nil {
			list = append(list, pc.tensors...)
		}
	}
	return list
}

// A verdict is the outcome of something in one process, as all processes receive it.
type verdict struct {
	Code                          diag.Code `json:",omitempty"`
	What, Where, Cause, Fix, Text string    `json:",omitempty"`
}

// err is the error of a verdict; nil for success.
func (v *verdict) err() error {
	if v.Code == "" {
		return nil
	}
	return &diag.Error{Code: v.Code, What: v.What, Where: v.Where, Cause: v.Cause, Fix: v.Fix}
}

// verdicts exchanges outcomes, each with a text. An error of another process names that process as
// its place.
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
