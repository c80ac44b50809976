package hlo

import (
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// A schedule has the instructions in the order in which they run, with operands that point back.
func TestSchedulesPointBackwards(t *testing.T) {
	for _, name := range fixtureNames(t) {
		if !strings.HasPrefix(name, "b200_") {
			continue // XLA:CPU does not schedule each computation
		}
		entry, err := fixture(t, name).Schedule()
		if err != nil {
			t.Fatal(err)
		}
		for n, i := range entry.Body {
			for _, o := range i.Operands {
				if o >= n {
					t.Errorf("%s: %s stands before its operand %s", name, i.Name, entry.Body[o].Name)
				}
			}
		}
		if entry.Root != len(entry.Body)-1 {
			t.Errorf("%s: the result is instruction %d of %d", name, entry.Root, len(entry.Body))
		}
	}
}

// The loop of b200_pipelined: six layers, of which the first and the last were peeled off.
func TestScheduleOfALoop(t *testing.T) {
	entry, err := fixture(t, "b200_pipelined").Schedule()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range entry.Body {
		if i.Opcode != "while" {
			continue
		}
		if i.Trips != 4 || len(i.Calls) != 2 {
			t.Errorf("%d rounds, %d computations; want 4, 2", i.Trips, len(i.Calls))
		}
		var flops int64
		domains := map[string]bool{}
		for _, inner := range i.Calls[0].Body {
			flops += inner.FLOPs
			if inner.Opcode == "async-start" && strings.Contains(inner.Name, "gather") {
				domains[inner.Domain] = true
				if c := inner.Calls[0].Body; len(c[len(c)-1].Collectives) != 1 {
					t.Error("the gather that is started is not there")
				}
			}
		}
		if want := int64(2 * 2 * 512 * 1024 * 1024); flops != want {
			t.Errorf("%d FLOPs in a round, want %d", flops, want)
		}
		if !domains["scale_up_fabric"] {
			t.Errorf("the gather is on %v", domains)
		}
		return
	}
	t.Error("there is no loop")
}

func TestFLOPs(t *testing.T) {
	const scores = 4 * 32 * 2048 * 2048 // half of them are masked
	for name, want := range map[string]int64{
		"b200_attention":      2 * scores * 128 * (2 + 5) / 2,
		"b200_attention_plan": 2 * scores * 128 * (2 + 5) / 2,
		"b200_mxfp8_8":        2 * 4096 * 16384 * 4096,
	} {
		entry, err := fixture(t, name).Schedule()
		if err != nil {
			t.Fatal(err)
		}
		sum := int64(0)
		for _, i := range entry.Body {
			sum += i.FLOPs
			for _, c := range i.Calls { // XLA:GPU puts a block-scaled product into a call
				for _, inner := range c.Body {
					sum += inner.FLOPs
				}
			}
		}
		if sum != want {
			t.Errorf("%s: %d FLOPs, want %d", name, sum, want)
		}
	}
	dims := func(list ...int64) msg { return msg(nil).Bytes(30, msg(nil).Packed(1, list...)) }
	plain := append(inst(2, "dot", array(f32, 8, 5), 1, 1), dims(1)...)
	entry := comp(1, "entry", 2, inst(1, "parameter", array(f32, 8, 7)), plain)
	c, err := mustRead(t, module(entry)).Schedule()
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Body[1].FLOPs; got != 2*8*5*7 {
		t.Errorf("dot: %d FLOPs, want %d", got, 2*8*5*7)
	}
}

// A configuration keeps its other parts when XLA writes a number where a name was, or without
// quotes.
func TestConfigurationsAreReadLeniently(t *testing.T) {
	c := parseConfig([]byte(`{"collective_backend_config":{"is_sync":true,"communication_domain":3},
		"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":[1,"0"]}}}`))
	if !c.Collective.IsSync || c.Collective.domain() != "3" {
		t.Errorf("collective %+v", c.Collective)
	}
	if got := c.Product.Dims.Contracting.ints(); len(got) != 2 || got[0] != 1 || got[1] != 0 {
		t.Errorf("contracting %v", got)
	}
}

func TestScheduleIsMadeOnce(t *testing.T) {
	m := fixture(t, "b200_pipelined")
	var wg sync.WaitGroup
	got := make([]*Computation, 4)
	for n := range got {
		wg.Go(func() { got[n], _ = m.Schedule() })
	}
	wg.Wait()
	for _, c := range got {
		if c == nil || c != got[0] {
			t.Error("callers were given different schedules")
		}
	}
	if _, err := (&Module{}).Schedule(); err == nil {
		t.Error("a module that was not read has a schedule")
	}
}

// An operand that is not there was never looked at by the account; the schedule must say so.
func TestScheduleOfABrokenProgram(t *testing.T) {
	entry := comp(1, "entry", 2, inst(1, "parameter", array(f32, 8)),
		inst(2, "add", array(f32, 8), 1, protowireMax))
	if _, err := mustRead(t, module(entry)).Schedule(); err == nil {
		t.Error("no error")
	}
}

const protowireMax = int64(protowire.MaxValidNumber)

// Of attention, what its mask hides is not counted, as planners do not: half of a causal one, also
// with packed documents, and what is before a window.
func TestMaskedFLOPs(t *testing.T) {
	const whole = 2 * 2 * 4 * 64 * 64 * 16 // two GEMMs of heads of 16
	for _, c := range []struct {
		mask, window string
		want         float64
	}{
		{"NO_MASK", "0", 1}, {"PADDING", "0", 1}, {"CAUSAL", "0", 0.5}, {"PADDING_CAUSAL", "0", 0.5},
		{"CAUSAL", "64", 0.5}, {"PADDING_CAUSAL", "16", (8.5*16 + 48*16) / 64 / 64},
	} {
		a := attentionConfig{Mask: word(c.mask), Window: word(c.window)}
		a.Scores.Dims = numbers{"1", "4", "64", "64"}
		got := a.flops("__cudnn$fmhaSoftmax", &shape{dims: []int64{1, 64, 4, 16}})
		if want := int64(c.want * whole); got != want {
			t.Errorf("%s, window %s: %d FLOPs, want %d", c.mask, c.window, got, want)
		}
	}
}
