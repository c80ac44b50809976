package deepwell

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
)

// checkOrder compares the NVLink domains that the GPUs of all processes report with those that the
// plan assumes. Process 0 compares; all return the same error.
func (r *runner) checkOrder() error {
	if r.plan == nil || r.plan.Cluster == "" {
		return nil
	}
	c, err := machine.ParseCluster(r.plan.Cluster)
	if err != nil {
		return err
	}
	mine, err := json.Marshal(nvlinkDomains(r.devices.gpus))
	if err != nil {
		return err
	}
	verdict, err := r.gathered("nvlink", mine, func(all [][]byte, _ []byte) []byte {
		text, err := json.Marshal(r.judgeOrder(c, all))
		if err != nil {
			return nil
		}
		return text
	})
	if err != nil {
		return err
	}
	var e *diag.Error
	if err := json.Unmarshal(verdict, &e); err != nil || e == nil {
		return err
	}
	// Process 0 ends when all have read why.
	_ = r.store.Put(fmt.Sprintf("nvlink/read/%d", r.processes.Self), nil)
	for n := range r.processes.Addresses {
		if r.processes.Self > 0 {
			break
		}
		if _, err := r.store.Get(fmt.Sprintf("nvlink/read/%d", n), lostGrace); err != nil {
			break
		}
	}
	return e
}

// nvlinkDomains names the NVLink domain of each GPU: its rack's fabric, or its host.
func nvlinkDomains(gpus []machine.GPU) []string {
	return lists.Map(gpus, func(g machine.GPU) string {
		if g.FabricDomain != "" {
			return "fabric " + g.FabricDomain
		}
		// Containers of one host have names of their own, and one kernel.
		id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if name, _ := os.Hostname(); err != nil {
			id = []byte(name)
		}
		return "host " + strings.TrimSpace(string(id))
	})
}

// judgeOrder returns an error if a group of an axis that the plan keeps in one NVLink domain would
// be in several, with the order of processes that mends it, if there is one.
func (r *runner) judgeOrder(c machine.Cluster, all [][]byte) *diag.Error {
	var domains []string           // by device
	processes := make([]int, 0, 8) // by device
	first := make([]string, len(all))
	for n, text := range all {
		var list []string
		if err := json.Unmarshal(text, &list); err != nil || len(list) == 0 {
			return diag.New(diag.PeersDiffer, "process %d does not say where its GPUs are", n)
		}
		first[n] = list[0]
		for _, d := range list {
			domains, processes = append(domains, d), append(processes, n)
		}
	}
	if len(domains) != int(r.plan.Devices()) {
		return diag.New(diag.PeersDiffer, "the processes have %d GPUs, and the plan %d", len(domains),
			r.plan.Devices())
	}
	axis, group := r.plan.Crosses(c.Domain(), domains)
	if axis == "" {
		return nil
	}
	at := r.job.Peers
	a := processes[group[0]]
	b := processes[group[slices.IndexFunc(group, func(d int64) bool {
		return domains[d] != domains[group[0]]
	})]]
	e := diag.New(diag.NVLinkOrder, "%s would cross NVLink domains: process %d at %s is in %s,"+
		" process %d at %s in %s", axis, a, at[a], first[a], b, at[b], first[b]).At("%s", r.job.Plan)
	order := byDomain(first)
	var moved []string
	for _, n := range order {
		for i, p := range processes {
			if p == n {
				moved = append(moved, domains[i])
			}
		}
	}
	if still, _ := r.plan.Crosses(c.Domain(), moved); still != "" {
		return e.Try("deepwell plan for what the hosts are, or hosts of one domain for each group of %s",
			axis)
	}
	names := lists.Map(order, func(n int) string { return at[n] })
	return e.Try("give all processes this order: --peers %s", fmt.Sprint(strings.Join(names, ",")))
}

// byDomain lists processes domain by domain, and otherwise in their order.
func byDomain(domains []string) (order []int) {
	for i, d := range domains {
		if slices.Index(domains, d) < i {
			continue
		}
		for n, other := range domains {
			if other == d {
				order = append(order, n)
			}
		}
	}
	return order
}
