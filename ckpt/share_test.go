package ckpt_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// shareOf is a source of some tensors, each of 64 bytes of one value.
func shareOf(t *testing.T, names ...string) *ckpt.Memory {
	t.Helper()
	m := &ckpt.Memory{}
	for _, name := range names {
		b, err := m.Add(ckpt.Tensor{Name: name, DType: dtype.F32, Shape: []int64{4, 4}})
		if err != nil {
			t.Fatal(err)
		}
		copy(b, slices.Repeat([]byte(name[:1]), len(b)))
	}
	return m
}

// begin gives the leader's end of a draft of step 7 and the other process's.
func begin(t *testing.T, dir string) (leader, other *ckpt.Draft) {
	t.Helper()
	leader, err := ckpt.Begin(t.Context(), dir, 7, ckpt.Options{Mark: "m1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(leader.Abort)
	if leader.Joined(1) {
		t.Error("joined before it was")
	}
	if other, err = ckpt.Join(dir, 7, "m1", 1, ckpt.Options{}); err != nil || !leader.Joined(1) {
		t.Fatal(err)
	}
	return leader, other
}

// Two processes write a checkpoint of which each has a part; nothing of how they did it stays.
func TestProcessesShareADraft(t *testing.T) {
	dir, meta := t.TempDir(), ckpt.Meta{Seed: 3, Data: map[string]int64{"row": 9}}
	leader, other := begin(t, dir)
	if _, err := ckpt.Join(dir, 7, "m2", 1, ckpt.Options{}); !errors.Is(err, diag.CheckpointWrite) {
		t.Errorf("another draft's mark: %v", err)
	}
	a := shareOf(t, "a", "b")
	_, err := leader.Share(t.Context(), 0, a, nil)
	sum, err2 := other.Share(t.Context(), 1, shareOf(t, "c"), nil)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	list := shareOf(t, "a", "b", "c").Tensors()
	if err := leader.Whole(list); !errors.Is(err, diag.CheckpointWrite) ||
		diag.From(err).Fix == "" {
		t.Errorf("a part is missing: %v", err)
	}
	if err := errors.Join(leader.Add(1, sum), leader.Add(2, ""), // 2 has nothing to write
		leader.Whole(list), leader.Commit(t.Context(), meta)); err != nil {
		t.Fatal(err)
	}
	c, err := ckpt.Latest(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	differ, err := ckpt.Diff(t.Context(), c, shareOf(t, "a", "b", "c"))
	if err != nil || len(differ) > 0 {
		t.Errorf("%v differ, %v", differ, err)
	}
	var names []string
	files, err := os.ReadDir(c.Path())
	for _, e := range files {
		names = append(names, e.Name())
	}
	want := []string{"manifest.json", "part-00000.safetensors", "part-00001.safetensors"}
	if err != nil || !slices.Equal(names, want) {
		t.Errorf("the folder has %v, %v", names, err)
	}
	has := func(m ckpt.Meta, src ckpt.Source) bool {
		same, err := m.Saved(t.Context(), dir, 7, src, nil)
		return same && err == nil
	}
	all := shareOf(t, "a", "b", "c")
	if !has(meta, all) || has(ckpt.Meta{Seed: 4}, all) || has(meta, a) {
		t.Error("what the checkpoint has is not distinguished from what it lacks")
	}
}

// What another process shared is not believed where it cannot be.
func TestSharesAreChecked(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(temp string) error
		more []string // what the leader writes itself
	}{
		{"a part is shorter than its writer says", func(temp string) error {
			return os.Truncate(filepath.Join(temp, "part-00001.safetensors"), 100)
		}, []string{"a"}},
		{"a share is truncated", func(temp string) error {
			return os.Truncate(filepath.Join(temp, "share-00001.json"), 100)
		}, []string{"a"}},
		{"a share is gone", func(temp string) error {
			return os.Remove(filepath.Join(temp, "share-00001.json"))
		}, []string{"a"}},
		{"a tensor twice", func(string) error { return nil }, []string{"a", "c"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			leader, other := begin(t, dir)
			_, err := leader.Share(t.Context(), 0, shareOf(t, c.more...), nil)
			sum, err2 := other.Share(t.Context(), 1, shareOf(t, "c"), nil)
			temp := filepath.Join(dir, ".tmp-step-00000007.m1")
			if err := errors.Join(err, err2, c.harm(temp)); err != nil {
				t.Fatal(err)
			}
			if err = leader.Add(1, sum); err == nil {
				err = leader.Commit(context.Background(), ckpt.Meta{})
			}
			if err == nil {
				t.Error("it is committed")
			}
			leader.Abort()
			if list, err := ckpt.List(dir); err != nil || len(list) > 0 {
				t.Errorf("%v, %v", list, err)
			}
		})
	}
}
