package autoplan

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/schedule"
)

// A Goal is what the best plan has least of.
type Goal string

// The goals.
const (
	Time  Goal = "time"  // seconds for a token
	Money Goal = "money" // device-seconds for a token; devices may be left unused
	// Memory is the peak of a device, among plans that take at most a tenth longer than the fastest:
	// without a bound the answer would be to recompute and offload everything.
	Memory Goal = "memory"
)

// Goals lists the goals.
func Goals() []Goal { return []Goal{Time, Money, Memory} }

// slowest is how much longer than the fastest plan one may take that has less memory.
const slowest = 1.10

// Margin is how much worse than the best found a plan may be in closed form and still be simulated.
// Of 1,000 random plans closed form and simulator differ by 0.01 % in the mean and by 0.7 % at most
// (a test), so that plans which are further apart than this do not change places.
const Margin = 1.01

// simulated is how many plans the simulator runs again.
const simulated = 100

// facts are the sizes of the model.
func (j *Job) facts() *model.Facts {
	f := j.Config.Facts()
	return &f
}

// A Job is what to plan for.
type Job struct {
	Model   string // the model's name, for the plan
	Config  *model.Config
	Cluster machine.Cluster
	Profile *price.Profile // the software that runs the plan; nil is Deepwell's own

	Seq int64 // tokens of a row
	// Batch is the rows of a step. 0 leaves them to the search, up to MaxBatch; of that 0 means
	// about 1,024 tokens for each device, as Llama 3.1 405B had on 16,384 (arXiv 2407.21783), and
	// no fewer than 4 million.
	Batch, MaxBatch int64

	Precisions []dtype.Format // of linear layers; empty means bf16
	// Policies are what precisions stand for, if not their usual policy.
	Policies map[dtype.Format]*precision.Policy
	Goal     Goal  // empty means time
	Fixed    Fixed // what the plan must have
	// Devices is how many devices the plan must use; 0 leaves some idle if that is better.
	Devices int
	Top     int // how many plans to tell; 0 means 5
	// Correction is what measured runs say of the predictions.
	Correction Correction
	// Capacity is the bytes that a plan may use of a device; 0 means 95 % of what the card gives.
	Capacity int64

	pool pool // of the searches for the job; nil if none follows another
}

// A Fixed is what a plan must have, by key: the sizes tp, cp, ep, pp, dp and fsdp, and zero,
// gather, virtual, schedule, microbatch (sequences per microbatch on a device), recompute and
// offload. The last two are lists with a plus between, or none; recompute may also be full.
type Fixed map[string]string

// A key of a Fixed has a name, and says what its values look like.
type key struct{ name, kind string }

func (k key) String() string { return k.name }

var keys = []key{
	{"tp", "size"}, {"cp", "size"}, {"ep", "size"}, {"pp", "size"}, {"dp", "size"}, {"fsdp", "size"},
	{"zero", "size"}, {"gather", "word"}, {"virtual", "size"}, {"schedule", "word"},
	{"microbatch", "size"}, {"recompute", "list"}, {"offload", "list"},
}

// ParseFixed reads NAME=VALUE with commas between, such as tp=8,pp=4,recompute=attn+mlp.
func ParseFixed(text string) (Fixed, error) {
	f := Fixed{}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		name, value, ok := strings.Cut(item, "=")
		if name == "micro" {
			return nil, diag.New(diag.BadUsage, "--fix micro is now --fix microbatch").
				Try("--fix microbatch=%s", value)
		}
		at := slices.IndexFunc(keys, func(k key) bool { return k.name == name })
		if at < 0 || !ok || value == "" {
			return nil, diag.New(diag.BadUsage, "invalid --fix %q", item).
				Try("write one of %s, such as tp=8", strings.Join(lists.Map(keys, key.String), ", "))
		}
		if err := checkFixed(name, keys[at].kind, value); err != nil {
			return nil, err
		}
		f[name] = value
	}
	return f, nil
}

func checkFixed(name, kind, value string) error {
	known := map[string][]string{
		"gather": gathers, "schedule": schedule.Names(), "recompute": tagNames, "offload": offloads,
	}[name]
	switch kind {
	case "size":
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < 1 || n > 1<<24 {
			return diag.New(diag.BadUsage, "invalid size %s=%s", name, value).Try("%s=1", name)
		}
	case "word":
		if !slices.Contains(known, value) {
			return diag.New(diag.BadUsage, "there is no %s %q", name, value).
				Try("write one of %s", strings.Join(known, ", "))
		}
	case "list":
		if name == "recompute" && value == "full" {
			return nil
		}
		for word := range strings.SplitSeq(value, "+") {
			if value != "none" && !slices.Contains(known, word) {
				return diag.New(diag.BadUsage, "%s cannot have %q", name, word).
					Try("write none, or one or more of %s, joined with +", strings.Join(known, ", "))
			}
		}
	}
	return nil
}

// String gives what ParseFixed reads.
func (f Fixed) String() string {
	var parts []string
	for _, k := range keys {
		if v, ok := f[k.name]; ok {
			parts = append(parts, k.name+"="+v)
		}
	}
	return strings.Join(parts, ",")
}

// size is a number that must be so, and whether there is one.
func (f Fixed) size(name string) (int64, bool) {
	text, fixed := f[name]
	if !fixed {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// allows reports whether a size may be n.
func (f Fixed) allows(name string, n int64) bool {
	want, fixed := f.size(name)
	return !fixed || want == n
}

// allowsWord is as allows, for words.
func (f Fixed) allowsWord(name, word string) bool {
	want, fixed := f[name]
	return !fixed || want == word
}

// allowsList is as allows, for lists, whose order does not matter.
func (f Fixed) allowsList(name string, list []string) bool {
	want, fixed := f[name]
	if !fixed {
		return true
	}
	if want == "none" {
		return len(list) == 0
	}
	words := strings.Split(want, "+")
	slices.Sort(words)
	sorted := slices.Sorted(slices.Values(list))
	return slices.Equal(slices.Compact(words), sorted)
}

// The least batch and the tokens of a device that a job has which says nothing.
const (
	leastBatch      = 4 << 20
	tokensPerDevice = 1024
)

// filled is the job with what was left out.
func (j Job) filled() (Job, error) {
	if j.Profile == nil {
		var err error
		if j.Profile, err = price.Find(price.Own); err != nil {
			return j, err
		}
	}
	switch {
	case j.Config == nil || j.Cluster.Count < 1:
		return j, diag.New(diag.BadInput, "a search needs a model and a cluster").
			Try("set Job.Config and Job.Cluster")
	case j.Seq < 1 || j.Batch < 0 || j.MaxBatch < 0:
		return j, diag.New(diag.BadInput, "%d sequences of %d tokens are not a batch", j.Batch,
			j.Seq).Try("--seq 8192, and --batch 512 or 4Mtok")
	case j.Goal != "" && !slices.Contains(Goals(), j.Goal):
		return j, diag.New(diag.BadUsage, "there is no goal %q", j.Goal).
			Try("--goal time, money or memory")
	case j.Devices < 0 || j.Devices > j.Cluster.Count:
		return j, diag.New(diag.BadUsage, "a plan cannot use %d of %d devices", j.Devices,
			j.Cluster.Count).Try("--devices %d", j.Cluster.Count)
	}
	if j.Goal == "" {
		j.Goal = Time
	}
	if j.Top < 1 {
		j.Top = 5
	}
	if len(j.Precisions) == 0 {
		j.Precisions = []dtype.Format{dtype.FormatBF16}
	}
	if j.Batch == 0 && j.MaxBatch == 0 {
		j.MaxBatch = max(1, max(leastBatch, tokensPerDevice*int64(j.Cluster.Count))/j.Seq)
	}
	if j.Capacity == 0 {
		// Memory is estimated to 5 % (docs/accuracy.md), and what is not left free is a crash.
		j.Capacity = j.Cluster.Card.UsableBytes / 100 * 95
		if j.Profile.Name == price.Own && j.Config.MoE == nil { // experts cannot be compiled yet
			// XLA computes again on its own before a card is full: 70b on 64 GB200 at 164 of 184 GiB.
			j.Capacity = j.Cluster.Card.UsableBytes / 100 * 85
		}
	}
	if j.Capacity <= 0 {
		return j, diag.New(diag.BadInput, "the memory of %s is not known", j.Cluster.Card.Title).
			Try("set Job.Capacity, in bytes")
	}
	return j, nil
}

// tokens is how many tokens a step has.
func (j Job) tokens(rows int64) float64 { return float64(rows) * float64(j.Seq) }

// mostIdle is the share of the devices that a search leaves idle at most, where a larger part is
// not the price of a goal.
const mostIdle = 0.25

// counts are the numbers of devices that a search tries: all, and fewer where that leaves more ways
// to cut, since 1,000 has few. A number is worth trying if every larger one has fewer factors of
// two; and among those that have no prime factor above 7, and no more odd factors than there are
// layers, so that a pipeline can take them where the rows of a step cannot. The largest power of
// two times 1, 3 or 9 is tried however much it leaves idle; for money halves of it too.
func (j Job) counts() []int {
	if j.Devices > 0 {
		return []int{j.Devices}
	}
	all := j.Cluster.Count
	list := []int{all}
	round := 1
	for _, odd := range []int{1, 3, 9} {
		for n := odd; n <= all; n *= 2 {
			round = max(round, n)
		}
	}
	list = append(list, round)
	even := func(n int) int { return bits.TrailingZeros(uint(n)) }
	smooth := func(n int) bool {
		odd := n >> even(n)
		return odd <= int(j.Config.Layers) && sevenSmooth(odd)
	}
	most := -1 // factors of two of the smooth numbers so far, which is from below
	if smooth(all) {
		most = even(all)
	}
	for k := even(all) + 1; 1<<k <= all; k++ {
		list = append(list, all&^(1<<k-1))
	}
	for k := range bits.Len(uint(all)) {
		for n := all &^ (1<<k - 1); float64(n) >= (1-mostIdle)*float64(all); n -= 1 << k {
			if even(n) > most && smooth(n) {
				list, most = append(list, n), even(n)
				break
			}
		}
	}
	list = slices.DeleteFunc(list, func(n int) bool {
		return n != round && float64(n) < (1-mostIdle)*float64(all)
	})
	if j.Goal == Money {
		for n := round / 2; n >= 1; n /= 2 {
			list = append(list, n)
		}
	}
	slices.SortFunc(list, func(a, b int) int { return b - a })
	return slices.Compact(list)
}

// sevenSmooth reports whether a number has no prime factor above 7.
func sevenSmooth(n int) bool {
	for _, p := range []int{2, 3, 5, 7} {
		for n%p == 0 {
			n /= p
		}
	}
	return n == 1
}

// paid is how many devices the bill is for: all of the cluster, in use or idle; only where money is
// the goal are fewer rented.
func (j Job) paid(used int) int {
	if j.Goal == Money {
		return used
	}
	return max(used, j.Cluster.Count)
}

// Warnings says what a person should know of a plan of the job before taking its figures for
// granted.
func (j Job) Warnings(p *plan.Plan, e *estimate.Estimate) []event.Warning {
	var list []event.Warning
	warn := func(fix, format string, args ...any) {
		list = append(list, event.Warning{Text: fmt.Sprintf(format, args...), Fix: fix})
	}
	used := int(p.Devices())
	if idle := j.Cluster.Count - used; idle > 0 {
		fix := fmt.Sprintf("--cluster %dx%s, or a batch that all can share", used, j.Cluster.Card.Name)
		bill := "the bill charges them"
		if j.Goal == Money {
			fix, bill = fmt.Sprintf("--cluster %dx%s", used, j.Cluster.Card.Name), "the bill is without them"
		}
		verb := "are"
		if idle == 1 {
			verb = "is"
		}
		warn(fix, "%d of %d devices %s left idle; %s", idle, j.Cluster.Count, verb, bill)
	}
	cluster, err := j.clusterOf(used)
	if err != nil {
		cluster = j.Cluster
	}
	if cluster.Note != "" {
		warn("", "%s", cluster.Note)
	}
	for _, text := range p.Straddles(cluster.Domain()) {
		warn("", "%s", text)
	}
	if e.Attention == kernels.Plain && p.CP.Size > 1 {
		warn("", "attention is plain, not cuDNN's: its scores go through memory")
	}
	if c := j.Config.Context; c > 0 && p.Seq > c {
		warn(fmt.Sprintf("--seq %d", c), "sequences of %d tokens are longer than the model's context "+
			"of %d", p.Seq, c)
	}
	return list
}

// clusterOf is the job's cluster with another number of devices.
func (j Job) clusterOf(n int) (machine.Cluster, error) {
	if n == j.Cluster.Count {
		return j.Cluster, nil
	}
	return machine.ParseCluster(fmt.Sprintf("%dx%s", n, j.Cluster.Card.Name))
}
