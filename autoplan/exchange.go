package autoplan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// An exchange is how rows go to experts and back (plan ep_kind and ep_overlap), chosen by price.
type exchange struct {
	kind    string // "" without expert parallelism, and for a2a
	overlap bool
	why     string
}

// exchangeKinds are the words of plan ep_kind.
var exchangeKinds = []string{allToAll, gatherTokens}

const allToAll, gatherTokens = "a2a", "gather"

// exchanges lists the ways to experts and back of a meshOption, the simplest first. Tokens are
// gathered within an NVLink domain only, and where that sends no more bytes; half batches need two
// sequences, and a format without a scale of the whole tensor ([plan.Plan.Check]).
func (j *Job) exchanges(n meshOption, domain int64) (list []exchange) {
	for _, kind := range exchangeKinds {
		for _, overlap := range []bool{false, true} {
			x := exchange{kind: kind, overlap: overlap}
			if j.allowsExchange(x) && (kind == allToAll || j.gatherTokens(n, domain) == "") &&
				(!overlap || j.halfBatches(n) == "") {
				if x.kind == allToAll {
					x.kind = ""
				}
				list = append(list, x)
			}
		}
	}
	return list
}

func (j *Job) allowsExchange(x exchange) bool {
	return j.Fixed.allowsWord("ep_kind", cmp.Or(x.kind, allToAll)) &&
		j.Fixed.allowsWord("ep_overlap", fmt.Sprint(x.overlap))
}

// gatherTokens says why devices of ep do not gather all tokens, with NVLink domains of that many
// devices; "" if they may.
func (j *Job) gatherTokens(n meshOption, domain int64) string {
	if j.Profile.Name != price.Own || n.ep == 1 {
		return "no ep"
	}
	rows := (&plan.Plan{Slots: j.Fixed.slots()}).ExpertSlots()[0] * float64(j.Config.MoE.TopK)
	switch fixed := j.Fixed["ep_kind"] == gatherTokens; {
	case fixed:
		return ""
	case domain%(n.tp*n.ep) != 0:
		return "gather: ep leaves an NVLink domain"
	case float64(n.ep) > rows:
		return fmt.Sprintf("gather: %.1f times the bytes", float64(n.ep)/rows)
	}
	return ""
}

// halfBatches says why layers do not work on two half batches; "" if they may.
func (j *Job) halfBatches(n meshOption) string {
	tensor := func(f dtype.Format) bool { return f.TensorScale() && j.has(n, f) }
	switch {
	case j.Profile.Name != price.Own || n.ep == 1:
		return "no ep"
	case n.microbatch%2 != 0:
		return "one sequence has no halves"
	case n.cp > 1 && j.Fixed["ep_overlap"] == "":
		return "cp halves sequences instead" // not searched: a smaller cp has as many tokens
	case slices.ContainsFunc(dtype.Formats(), tensor):
		return "scales are of whole tensors"
	}
	return ""
}

// has reports whether GEMMs of an option are in a format.
func (j *Job) has(n meshOption, f dtype.Format) bool {
	prec := j.Precisions[n.precision]
	if p := j.Policies[prec]; p != nil {
		return p.Has(f)
	}
	return prec == f
}

// An exchangeKey is what the choice of an exchange depends on. Tensor and context parallelism and
// more sequences change the work beside it, not which way is the fastest.
type exchangeKey struct {
	ep               int64
	gather, halves   bool // whether they are among the ways
	count, precision int
}

// exchange chooses one of several ways to experts, by the work of a microbatch of two sequences
// ([worker.work]). Another than the simplest must be faster by more than a prediction resolves.
func (w *worker) exchange(n meshOption, ways []exchange,
	chosen map[exchangeKey]exchange) exchange {
	if n.ep == 1 || len(ways) == 0 || w.searcher.job.Profile.Name != price.Own {
		return exchange{}
	}
	key := exchangeKey{ep: n.ep, count: n.count, precision: n.precision}
	for _, x := range ways {
		key.gather, key.halves = key.gather || x.kind == gatherTokens, key.halves || x.overlap
	}
	if x, known := chosen[key]; known {
		return x
	}
	like := n
	like.tp, like.cp, like.microbatch = 1, 1, 2
	like.kind = w.searcher.job.contexts(1, 1)[0].Kind
	times, best := make([]float64, len(ways)), 0 // 0 has no price
	for i, x := range ways {
		if i == 3 && times[2] >= times[0] {
			break // gathering tokens is slower, whole batch or halves
		}
		like.exchange = x
		times[i] = w.work(like)
		if times[i] > 0 && (times[best] == 0 || times[i]*same < times[best]) {
			best = i
		}
	}
	x := ways[best]
	x.why = w.searcher.whyExchange(n, ways, times, best)
	chosen[key] = x
	return x
}

// whyExchange writes the choice of ep_kind and ep_overlap, and what the others would cost.
func (s *searcher) whyExchange(n meshOption, ways []exchange, times []float64,
	best int) string {
	x, j := ways[best], &s.job
	// slower compares one way with another; "" if one of them has no price.
	slower := func(one, other exchange) string {
		a, b := slices.Index(ways, one), slices.Index(ways, other)
		if a < 0 || b < 0 || times[a]*times[b] == 0 {
			return ""
		}
		return fmt.Sprintf("%+.1f %%", 100*(times[b]/times[a]-1))
	}
	kind, other := cmp.Or(x.kind, allToAll), exchange{kind: gatherTokens, overlap: x.overlap}
	if x.kind == gatherTokens {
		other.kind = ""
	}
	reason := cmp.Or(j.Fixed.only("ep_kind"), j.gatherTokens(n, s.domains[n.count]))
	whole := exchange{kind: other.kind} // if halves have no price
	if s := cmp.Or(slower(x, other), slower(exchange{kind: x.kind}, whole)); s != "" {
		reason = fmt.Sprintf("%s: %s", cmp.Or(other.kind, allToAll), s)
	}
	words := []string{"ep_kind " + kind + bracketed(reason)}
	halves, reason := "no ep_overlap", cmp.Or(j.Fixed.only("ep_overlap"), j.halfBatches(n))
	if x.overlap {
		halves = "ep_overlap"
	}
	if s := slower(x, exchange{kind: x.kind, overlap: !x.overlap}); s != "" {
		reason = map[bool]string{true: "without: ", false: "with: "}[x.overlap] + s
	}
	words = append(words, halves+bracketed(reason))
	return strings.Join(words, ", ")
}

func bracketed(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}
