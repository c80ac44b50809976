package autoplan

import (
	"fmt"
	"math"
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

// A Goal is the quantity to minimize.
type Goal string

// The goals.
const (
	Time  Goal = "time"  // seconds per token
	Money Goal = "money" // device-seconds per token; devices may be left unused
	// Memory is the peak bytes of a device, among plans at most 10 % slower than the fastest. Without
	// that bound the answer would always be to recompute and offload everything.
	Memory Goal = "memory"
)

// Goals lists the goals.
func Goals() []Goal { return []Goal{Time, Money, Memory} }

// slowest is the largest step time of a plan for [Memory], relative to the fastest plan.
const slowest = 1.10

// Margin is how much worse than the best found a plan may be in closed form and still be
// simulated. Over 1,000 random plans, closed form and simulator differ by 0.01 % on average and by
// 0.7 % at most (a test), so plans further apart than this keep their order.
const Margin = 1.01

// simulated is the number of plans that the simulator reruns.
const simulated = 100

// facts returns the model's sizes.
func (j *Job) facts() *model.Facts {
	f := j.Config.Facts()
	return &f
}

// A Job describes what to plan for.
type Job struct {
	Model   string // the model's name, for the plan
	Config  *model.Config
	Cluster machine.Cluster
	Profile *price.Profile // the software that runs the plan; nil is Deepwell's own

	Seq int64 // tokens of a sequence
	// Batch is the number of sequences in a global batch. 0 lets the search choose, up to MaxBatch. A
	// MaxBatch of 0 means about 1,024 tokens per device, as Llama 3.1 405B had on 16,384 GPUs (arXiv
	// 2407.21783), and at least 4 million tokens.
	Batch, MaxBatch int64

	Precisions []dtype.Format // formats of linear-layer GEMMs to search; empty means bf16
	// Policies replaces the default precision policy of a format.
	Policies map[dtype.Format]*precision.Policy
	Goal     Goal  // empty means time
	Fixed    Fixed // what the plan must have
	// Devices is the number of devices a plan must use; 0 lets the search leave some idle.
	Devices int
	Top     int // number of plans to list; 0 means 5
	// Correction rescales predictions by measured runs.
	Correction Correction
	// Capacity is the bytes of a device that a plan may use; 0 means 95 % of the GPU's usable memory.
	Capacity int64

	pool pool // shared by consecutive searches of the job; nil without any
}

// A Fixed is what a plan must have, by key: the sizes tp, cp, ep, pp, dp and fsdp, cp.kind,
// ep_kind, ep_overlap, zero, gather, virtual, schedule, microbatch (sequences per microbatch on a
// device), slots, recompute and offload. The last three are lists with a plus between; recompute
// and offload may be none, and recompute full.
type Fixed map[string]string

// A key is a name that --fix accepts, and the kind of its values: size, word, list or numbers.
type key struct{ name, kind string }

func (k key) String() string { return k.name }

// keys lists what --fix accepts, in the order of messages.
var keys = []key{
	{"tp", "size"}, {"cp", "size"}, {"cp.kind", "word"}, {"ep", "size"}, {"ep_kind", "word"},
	{"ep_overlap", "word"}, {"pp", "size"},
	{"dp", "size"}, {"fsdp", "size"},
	{"zero", "size"}, {"gather", "word"}, {"virtual", "size"}, {"schedule", "word"},
	{"microbatch", "size"}, {"slots", "numbers"}, {"recompute", "list"}, {"offload", "list"},
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
				Try("write one of %s, devices, such as tp=8",
					strings.Join(lists.Map(keys, key.String), ", "))
		}
		if err := checkFixed(name, keys[at].kind, value); err != nil {
			return nil, err
		}
		if f[name] != "" {
			return nil, diag.New(diag.BadUsage, "--fix has %s twice", name).
				Try("%s=%s or %s=%s", name, f[name], name, value)
		}
		f[name] = value
	}
	if g := f["gather"]; (f["zero"] == "1" || f["zero"] == "2") && g != "" && g != "step" {
		return nil, diag.New(diag.BadUsage, "gather applies to zero 3 only").At("--fix %s", f).
			Because("with zero %s every device has all parameters for the whole step", f["zero"]).
			Try("--fix zero=3,gather=%s, or zero=%s without gather", g, f["zero"])
	}
	return f, nil
}

// checkFixed reports a value that its key cannot have.
func checkFixed(name, kind, value string) error {
	known := map[string][]string{
		"gather": gathers, "cp.kind": plan.CP{}.Kinds(), "ep_kind": exchangeKinds,
		"ep_overlap": {"true", "false"}, "schedule": schedule.Names(),
		"recompute": tagNames, "offload": offloads,
	}[name]
	switch kind {
	case "size":
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < 1 || n > 1<<24 {
			return diag.New(diag.BadUsage, "invalid size %s=%s", name, value).Try("%s=1", name)
		}
	case "word":
		if name == "gather" && value == "micro" {
			return diag.New(diag.BadUsage, "gather=micro is now gather=%s", plan.GatherMicrobatch).
				Try("--fix gather=%s", plan.GatherMicrobatch)
		}
		if !slices.Contains(known, value) {
			return diag.New(diag.BadUsage, "there is no %s %q", name, value).
				Try("write one of %s", strings.Join(known, ", "))
		}
	case "numbers":
		if _, err := numbers(value); err != nil {
			return diag.New(diag.BadUsage, "%s=%s are not growing numbers from 1 on", name, value).
				Try("%s=1.25+4", name)
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

// numbers reads growing numbers from 1 on with a plus between.
func numbers(text string) (list []float64, err error) {
	for word := range strings.SplitSeq(text, "+") {
		x, err := strconv.ParseFloat(word, 64)
		if err == nil && (!(x >= 1) || math.IsInf(x, 0) || len(list) > 0 && x <= list[len(list)-1]) {
			err = strconv.ErrRange
		}
		if err != nil {
			return nil, err
		}
		list = append(list, x)
	}
	return list, nil
}

// slots are the plan's slots of experts; nil if they are not fixed.
func (f Fixed) slots() []float64 {
	if f["slots"] == "" {
		return nil
	}
	list, _ := numbers(f["slots"]) // ParseFixed has read them
	return list
}

// imbalance is the load of the busiest experts in parts of the mean, in the search's Options. Our
// own programs compute all slots, whatever is in them: the plan has these. Of other stacks, which
// compute as many rows as there are, it is the first.
func (j *Job) imbalance() float64 {
	if list := j.Fixed.slots(); len(list) > 0 && j.Profile.Name != price.Own {
		return list[0]
	}
	return 0
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

// only gives some keys of f as text; "" if none of them is fixed.
func (f Fixed) only(names ...string) string {
	some := Fixed{}
	for _, name := range names {
		if v, ok := f[name]; ok {
			some[name] = v
		}
	}
	return some.String()
}

// size returns the fixed size of an axis, and whether it is fixed.
func (f Fixed) size(name string) (int64, bool) {
	text, fixed := f[name]
	if !fixed {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// allows reports whether a size may be n: it is not fixed, or fixed to n.
func (f Fixed) allows(name string, n int64) bool {
	want, fixed := f.size(name)
	return !fixed || want == n
}

// allowsWord is allows for words.
func (f Fixed) allowsWord(name, word string) bool {
	want, fixed := f[name]
	return !fixed || want == word
}

// allowsList is allows for lists, whose order does not matter.
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

// The smallest default batch, in tokens, and the default tokens per device.
const (
	leastBatch      = 4 << 20
	tokensPerDevice = 1024
)

// filled returns the job with its defaults filled in.
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
	case j.Config.MoE == nil && j.Fixed.only("slots", "ep_kind", "ep_overlap") != "":
		fixed := j.Fixed.only("slots", "ep_kind", "ep_overlap")
		return j, diag.New(diag.BadUsage, "%s is for experts, and %s has none", fixed, j.Model).
			At("--fix %s", fixed).Try("leave it out")
	case j.Devices < 0 || j.Devices > j.Cluster.Count:
		return j, diag.New(diag.BadUsage, "a plan cannot use %d of %d devices", j.Devices,
			j.Cluster.Count).Try("--fix devices=%d", j.Cluster.Count)
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
		// Peak memory is predicted within 5 % (docs/accuracy.md), and running out of it kills the run.
		j.Capacity = j.Cluster.GPU.UsableBytes / 100 * 95
		if j.Profile.Name == price.Own {
			// XLA starts to rematerialize on its own before a GPU is full: llama3.1-70b on 64 GB200 at 164
			// of 184 GiB. Rematerialization is not in the cost model, so plans stay below that.
			j.Capacity = j.Cluster.GPU.UsableBytes / 100 * 85
		}
	}
	if j.Capacity <= 0 {
		return j, diag.New(diag.BadInput, "the memory of %s is not known", j.Cluster.GPU.Title).
			Try("set Job.Capacity, in bytes")
	}
	return j, nil
}

// MFU is the model FLOPs utilization of a step of some sequences that takes that many seconds:
// model FLOPs over what the devices in use could do at their dense BF16 peak, whatever the format.
// Recomputation does not count, and attention counts the keys that the mask lets through, half of
// them if it is causal. It is 0 if the peak is not known.
func (j Job) MFU(rows int64, devices int, seconds float64) float64 {
	peak := j.Cluster.GPU.Peak.BF16 * float64(devices) * seconds
	if peak == 0 {
		return 0
	}
	return j.tokens(rows) * j.Config.Forward(j.Seq).Training().Sum() / peak
}

// tokens is the number of tokens in a step of that many sequences.
func (j Job) tokens(rows int64) float64 { return float64(rows) * float64(j.Seq) }

// mostIdle is the largest share of the devices that a search may leave idle when the goal is not
// money.
const mostIdle = 0.25

// counts lists the numbers of devices that a search tries: all of them, and smaller numbers with
// more divisors, since 1,000 has few. A number is worth trying if every larger one has fewer
// factors of two, among numbers with no prime factor above 7 and no more odd factors than there
// are layers: then a pipeline can absorb the odd factors when the batch cannot. The largest power
// of two times 1, 3 or 9 is tried however many devices it leaves idle; for money, halves of it as
// well.
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
	most := -1 // factors of two of the smooth numbers so far, from above
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

// paid is the number of devices on the bill: the whole cluster, in use or idle. Only if money is
// the goal are fewer rented.
func (j Job) paid(used int) int {
	if j.Goal == Money {
		return used
	}
	return max(used, j.Cluster.Count)
}

// Warnings lists what limits the trust in a plan's figures: idle devices, a sequence beyond the
// model's context, a cost model that was never fitted.
func (j Job) Warnings(p *plan.Plan, e *estimate.Estimate) []event.Warning {
	var list []event.Warning
	warn := func(fix, format string, args ...any) {
		list = append(list, event.Warning{Text: fmt.Sprintf(format, args...), Fix: fix})
	}
	used := int(p.Devices())
	if idle := j.Cluster.Count - used; idle > 0 {
		fix := fmt.Sprintf("--cluster %dx%s, or a batch that all can share", used, j.Cluster.GPU.Name)
		bill := "the bill charges them"
		if j.Goal == Money {
			fix, bill = fmt.Sprintf("--cluster %dx%s", used, j.Cluster.GPU.Name), "the bill is without them"
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
	for _, text := range p.SplitAcrossNVLink(cluster.Domain()) {
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

// clusterOf is the job's cluster with n devices.
func (j Job) clusterOf(n int) (machine.Cluster, error) {
	if n == j.Cluster.Count {
		return j.Cluster, nil
	}
	return machine.ParseCluster(fmt.Sprintf("%dx%s", n, j.Cluster.GPU.Name))
}
