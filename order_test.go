package deepwell

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// The order of processes is held to the NVLink domains that their GPUs report, and what the plan
// does not keep inside of a domain may cross.
func TestOrderFollowsNVLink(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, domains string // a letter for each process of 4 GPUs
		tp, fsdp      int64
		says, fix     string
	}{
		{"in order", "AABB", 8, 2, "", ""},
		{"other names", "BBAA", 8, 2, "", ""},
		{"one domain", "AAAA", 8, 2, "", ""},
		{"interleaved", "ABAB", 8, 2, "tp would cross NVLink domains: process 0 at a:1 is in A," +
			" process 1 at b:1 in B", "--peers a:1,c:1,b:1,d:1"},
		{"smaller domains", "ABCD", 8, 2, "process 0 at a:1 is in A, process 1 at b:1 in B",
			"deepwell plan for what the hosts are"},
		{"tp inside of a process, fsdp outside of domains", "ABAB", 4, 4, "", ""},
		{"all cross by the plan", "ABAB", 16, 1, "", ""},
	} {
		p := plan.Default()
		p.Cluster, p.TP.Size, p.FSDP.Size = "16xb200", row.tp, row.fsdp
		r := &runner{plan: p, job: TrainJob{Peers: []string{"a:1", "b:1", "c:1", "d:1"}}}
		c, err := machine.ParseCluster(p.Cluster)
		if err != nil {
			t.Fatal(err)
		}
		var all [][]byte
		for d := range strings.SplitSeq(row.domains, "") {
			text, err := json.Marshal([]string{d, d, d, d})
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, text)
		}
		e := r.judgeOrder(c, all)
		switch {
		case (e != nil) != (row.says != ""):
			t.Errorf("%s: %v", row.name, e)
		case e != nil && (e.Code != diag.NVLinkOrder || !strings.Contains(e.What, row.says) ||
			!strings.Contains(e.Fix, row.fix)):
			t.Errorf("%s: %s; %s", row.name, e.What, e.Fix)
		}
	}
}
