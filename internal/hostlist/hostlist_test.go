package hostlist

import (
	"slices"
	"strings"
	"testing"
)

func TestExpand(t *testing.T) {
	for list, want := range map[string]string{
		"":                             "",
		"a:1":                          "a:1",
		"a:1,b:2":                      "a:1 b:2",
		"a,b:2":                        "a:2 b:2",
		"node[1-3]:7000":               "node1:7000 node2:7000 node3:7000",
		"node[08-11,20],x:7":           "node08:7 node09:7 node10:7 node11:7 node20:7 x:7",
		"r[0-1]n[1-2]":                 "r0n1 r0n2 r1n1 r1n2",
		"run-w-0-[0-1].run:7000":       "run-w-0-0.run:7000 run-w-0-1.run:7000",
		"[::1]:7000,[fe80::2]:7001":    "[::1]:7000 [fe80::2]:7001",
		" a:1 , b:1 ,":                 "a:1 b:1",
		"dgx[1,3]:1":                   "dgx1:1 dgx3:1",
		"127.0.0.1:7000,127.0.0.1:701": "127.0.0.1:7000 127.0.0.1:701",
	} {
		got, err := Expand(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: %q, %v", list, got, err)
		}
	}
	for _, list := range []string{"a[", "a]", "a[1-", "a[3-1]", "a[x]", "a[1-2", "a[[1]]", "a[]",
		"a[0-99999999]", "a[1-9999999999]", "a[0-999][0-999][0-9]"} {
		if got, err := Expand(list); err == nil {
			t.Errorf("%q: %d names", list, len(got))
		}
	}
}

func TestRank(t *testing.T) {
	set := map[string]string{"RANK": "3", "SLURM_PROCID": "x"}
	if n, name, ok := Rank(func(s string) string { return set[s] }); n != 3 || name != "RANK" || !ok {
		t.Errorf("%d of %s, %v", n, name, ok)
	}
	if _, _, ok := Rank(func(string) string { return "" }); ok {
		t.Error("no variable is set")
	}
}

func FuzzExpand(f *testing.F) {
	f.Add("node[08-11,20],x:7")
	f.Add("[::1]:7000")
	f.Fuzz(func(t *testing.T, list string) {
		names, err := Expand(list)
		if err == nil && slices.Contains(names, "") {
			t.Errorf("%q has an empty name", list)
		}
	})
}
