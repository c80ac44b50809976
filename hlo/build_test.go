package hlo

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/hlotest"
)

type msg = hlotest.Msg

const f32, token = hlotest.F32, hlotest.Token

var array, tupleOf, inst, comp = hlotest.Array, hlotest.Tuple, hlotest.Inst, hlotest.Comp

// module makes an HloModuleProto; computation 1 is the entry.
func module(comps ...msg) msg { return hlotest.Module("m", 1, comps...) }

func mustRead(t testing.TB, code msg) *Module {
	t.Helper()
	m, err := Read("hlo", code)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// one reads a program whose entry is a parameter and one instruction.
func one(t testing.TB, i msg) Collective {
	t.Helper()
	entry := comp(1, "entry", 2, inst(1, "parameter", array(f32, 8)), i)
	rows := mustRead(t, module(entry)).Collectives()
	if len(rows) != 1 {
		t.Fatalf("%d rows, want 1", len(rows))
	}
	return rows[0]
}

func TestEveryEncodingOfGroupsIsRead(t *testing.T) {
	gather := func() msg { return inst(2, "all-gather", array(f32, 32), 1) }
	group := func(ids ...int64) msg { return msg(nil).Packed(1, ids...) }
	iota := func(groups, size int64, dims, perm []int64) msg {
		return msg(nil).Int(1, groups).Int(2, size).Packed(3, dims...).Packed(4, perm...)
	}
	axis := func(name string, size int64) msg { return msg(nil).Text(1, name).Int(2, size) }
	mesh := msg(nil).Bytes(1, axis("data", 4)).Bytes(1, axis("host", 2)).Bytes(1, axis("model", 8))
	unpacked := msg(nil).Int(1, 0).Int(1, 2)
	for name, test := range map[string]struct {
		i    msg
		want string
	}{
		"none":     {gather(), "all devices"},
		"old":      {gather().Bytes(49, group(0, 1, 2, 3)).Bytes(49, group(4, 5, 6, 7)), "2 groups of 4"},
		"unpacked": {gather().Bytes(49, unpacked), "1 group of 2, stride 2"},
		"list": {gather().Bytes(87, msg(nil).Bytes(1, group(0, 8)).Bytes(1, group(1, 9))),
			"2 groups of 2, stride 8"},
		"uneven":     {gather().Bytes(49, group(0, 1)).Bytes(49, group(2, 3, 4)), "2 groups of 2 to 3"},
		"irregular":  {gather().Bytes(49, group(0, 1, 3)), "1 group of 3"},
		"descending": {gather().Bytes(49, group(3, 2, 1)), "1 group of 3"},
		"old iota": {gather().Bytes(87, msg(nil).Bytes(2, iota(8, 4, []int64{32}, []int64{0}))),
			"8 groups of 4"},
		"iota": {gather().Bytes(92, iota(8, 8192, []int64{8192, 8}, []int64{1, 0})),
			"8 groups of 8192, stride 8"},
		// Groups that cross the rows of the array: once taken for irregular.
		"iota across rows": {gather().Bytes(92, iota(3, 2, []int64{2, 3}, nil)), "3 groups of 2"},
		"mesh model": {gather().Bytes(93, msg(nil).Bytes(1, mesh).Bytes(2, msg(nil).Int(1, 2))),
			"8 groups of 8"},
		"mesh data": {gather().Bytes(93, msg(nil).Bytes(1, mesh).Bytes(2, msg(nil))),
			"16 groups of 4, stride 16"},
		"mesh host, model": {gather().Bytes(93, msg(nil).Bytes(1, mesh).
			Bytes(2, msg(nil).Int(1, 1)).Bytes(2, msg(nil).Int(1, 2))), "4 groups of 16"},
		"half of model": {gather().Bytes(93, msg(nil).Bytes(1, mesh).
			Bytes(2, msg(nil).Int(1, 2).Bytes(2, msg(nil).Int(1, 1).Int(2, 2)))),
			"32 groups of 2, stride 4"},
		"mesh of named devices": {gather().Bytes(93, msg(nil).Bytes(1, mesh.Packed(2, 3, 1)).
			Bytes(2, msg(nil))), "16 groups of 4"},
		"pairs": {inst(2, "collective-permute", array(f32, 8), 1).
			Bytes(52, msg(nil).Int(2, 1)).Bytes(52, msg(nil).Int(1, 1)), "2 pairs"},
	} {
		if got := one(t, test.i).Group.String(); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// Written out device by device or as an iota, the same groups are the same.
func TestIotaAgreesWithItsDevices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dims := rapid.SliceOfN(rapid.Int64Range(1, 5), 1, 4).Draw(t, "dims")
		places := make([]int64, len(dims))
		total := int64(1)
		for i, d := range dims {
			places[i] = int64(i)
			total *= d
		}
		perm := rapid.Permutation(places).Draw(t, "perm")
		var divisors []int64
		for n := int64(1); n <= total; n++ {
			if total%n == 0 {
				divisors = append(divisors, n)
			}
		}
		size := rapid.SampledFrom(divisors).Draw(t, "size")

		digits, _ := permute(rowMajor(dims), perm)
		ids := []int64{0}
		for _, d := range digits { // the last digit moves fastest
			var next []int64
			for _, id := range ids {
				for k := range d.size {
					next = append(next, id+k*d.stride)
				}
			}
			ids = next
		}
		var list tally
		for chunk := range slices.Chunk(ids, int(size)) {
			if err := list.addGroup(msg(nil).Packed(1, chunk...)); err != nil {
				t.Fatal(err)
			}
		}
		compact := msg(nil).Int(1, total/size).Int(2, size).Packed(3, dims...).Packed(4, perm...)
		got, err := decodeIota(compact)
		if err != nil {
			t.Fatal(err)
		}
		if want := list.group(); got != want {
			t.Fatalf("iota %+v, devices %v say %+v", got, ids, want)
		}
	})
}

func TestGroupIsAllDevicesWhereTheProgramSaysHowMany(t *testing.T) {
	code := module(comp(1, "entry", 2, inst(1, "parameter", array(f32, 8)),
		inst(2, "all-reduce", array(f32, 8), 1).Int(26, 1)))
	m, err := Read("hlo_with_config", msg(nil).Bytes(1, code).Bytes(2, msg(nil).Int(4, 4).Int(5, 2)))
	if err != nil {
		t.Fatal(err)
	}
	if got := m.Collectives()[0].Group.String(); got != "1 group of 8" {
		t.Errorf("4 replicas of 2 partitions: %s", got)
	}
}

// The asynchronous forms that plugins wrote before all of them became async-start.
func TestOlderAsyncForms(t *testing.T) {
	in, out, context := array(f32, 8), array(f32, 32), array(8)
	param := inst(1, "parameter", in)
	sync := `{"collective_backend_config":{"is_sync":true}}`
	for name, test := range map[string]struct {
		i     msg
		bytes []int64 // operand, result of each row
		async bool
	}{
		"gather": {inst(2, "all-gather-start", tupleOf(in, out), 1), []int64{32, 128}, true},
		"gather of two": {inst(2, "all-gather-start",
			tupleOf(tupleOf(in, in), tupleOf(out, out)), 1, 1), []int64{32, 128, 32, 128}, true},
		"sum": {inst(2, "all-reduce-start", in, 1), []int64{32, 32}, true},
		"sum of two": {inst(2, "all-reduce-start", tupleOf(in, in), 1, 1),
			[]int64{32, 32, 32, 32}, true},
		"permute": {inst(2, "collective-permute-start",
			tupleOf(in, in, context, context), 1), []int64{32, 32}, true},
		"synchronous after all": {inst(2, "all-reduce-start", in, 1).Text(43, sync),
			[]int64{32, 32}, false},
	} {
		rows := mustRead(t, module(comp(1, "entry", 2, param, test.i))).Collectives()
		var got []int64
		for _, r := range rows {
			got = append(got, r.OperandBytes, r.ResultBytes)
			if r.Async != test.async {
				t.Errorf("%s: async is %v", name, r.Async)
			}
		}
		if !slices.Equal(got, test.bytes) {
			t.Errorf("%s: bytes %v, want %v", name, got, test.bytes)
		}
	}
}

// An async-done of an older plugin names the wrapped computation again, and two calls may share
// one computation: neither doubles the row, and both count.
func TestWrappedCollectiveCountsOncePerStart(t *testing.T) {
	s := array(f32, 8)
	wrapped := comp(2, "async_computation", 2, inst(1, "parameter", s),
		inst(2, "all-to-all", s, 1).Packed(14, 0))
	start := func(id int64, config string) msg {
		return inst(id, "async-start", tupleOf(tupleOf(s), s), 1).Packed(38, 2).Text(43, config)
	}
	entry := comp(1, "entry", 5, inst(1, "parameter", s),
		start(2, ""), inst(3, "async-done", s, 2).Packed(38, 2),
		start(4, ""), inst(5, "async-done", s, 4).Packed(38, 2))
	rows := mustRead(t, module(entry, wrapped)).Collectives()
	if len(rows) != 1 || rows[0].Count != 2 || !rows[0].Async || rows[0].Name != "async-start.2" ||
		rows[0].In != "entry" {
		t.Errorf("%+v", rows)
	}

	sync := start(2, `{"collective_backend_config":{"is_sync":true}}`)
	entry = comp(1, "entry", 1, inst(1, "parameter", s), sync)
	rows = mustRead(t, module(entry, wrapped)).Collectives()
	if len(rows) != 1 || rows[0].Async {
		t.Errorf("is_sync is not believed: %+v", rows)
	}
}

func loop(id int64, body, condition int64, config string) msg {
	return inst(id, "while", array(f32, 8), 1).Packed(38, body, condition).Text(43, config)
}

func TestTripCounts(t *testing.T) {
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	for config, want := range map[string]struct {
		count   int64
		unknown bool
	}{
		`{"known_trip_count":{"n":"126"}}`:                  {126, false},
		`{"known_trip_count":{"n":7}}`:                      {7, false},
		`{"known_trip_count":{"n":"0"}}`:                    {0, false},
		`{"known_trip_count":{}}`:                           {0, false},
		`{"known_trip_count":{"n":"-3"}}`:                   {1, true},
		`{"known_trip_count":{"n":"many"}}`:                 {1, true},
		`{"known_init_step":{"init":"0","step":"1"}}`:       {1, true},
		`{"known_trip_count":{"n":"9223372036854775807"}}`:  {math.MaxInt64, false},
		`{"known_trip_count":{"n":"92233720368547758070"}}`: {1, true},
		``:            {1, true},
		`not json`:    {1, true},
		"\x0a\x02abc": {1, true},
	} {
		m := mustRead(t, module(comp(1, "entry", 2, param, loop(2, 2, 3, config)),
			comp(2, "body", 2, param, inst(2, "all-reduce", s, 1)), comp(3, "condition", 1, param)))
		if c := m.Collectives()[0]; c.Count != want.count || c.TripUnknown != want.unknown {
			t.Errorf("%q: %d times, unknown %v; want %+v", config, c.Count, c.TripUnknown, want)
		}
	}
}

func TestConfigurationMayBeAPayload(t *testing.T) {
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	body := comp(2, "body", 2, param, inst(2, "all-reduce", s, 1))
	condition := comp(3, "condition", 1, param)
	while := inst(2, "while", s, 1).Packed(38, 2, 3)
	by := func(payload msg) int64 {
		code := module(comp(1, "entry", 2, param, while.Bytes(99, payload)), body, condition).
			Text(22, "{}").Text(22, `{"known_trip_count":{"n":"5"}}`)
		return mustRead(t, code).Collectives()[0].Count
	}
	if got := by(msg(nil).Int(2, 1)); got != 5 {
		t.Errorf("by number: %d", got)
	}
	if got := by(msg(nil).Text(1, `{"known_trip_count":{"n":"4"}}`)); got != 4 {
		t.Errorf("in place: %d", got)
	}
	if got := by(msg(nil).Int(2, 9)); got != 1 {
		t.Errorf("a payload that is not there: %d", got)
	}
}

func TestOnlyWhatIsReachedAndRunCounts(t *testing.T) {
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	sum := inst(2, "all-reduce", s, 1).Packed(38, 3)
	m := mustRead(t, module(
		comp(1, "entry", 4, param, sum, inst(3, "fusion.remat", s, 2),
			inst(4, "call", s, 3).Packed(38, 2)),
		comp(2, "callee", 2, param, inst(2, "negate", s, 1)),
		comp(3, "reducer", 2, param, inst(2, "all-gather", s, 1)), // applied, not run
		comp(4, "orphan", 2, param, inst(2, "reduce-scatter.remat2", s, 1)),
	))
	if rows := m.Collectives(); len(rows) != 1 || rows[0].Kind != AllReduce {
		t.Errorf("%+v", rows)
	}
	if got := m.Remat(); !slices.Equal(got, []string{"fusion.remat.3"}) {
		t.Errorf("remat %v", got)
	}
	want := "[{all-reduce 1} {call 1} {fusion.remat 1} {negate 1} {parameter 2}]"
	if got := fmt.Sprint(m.ops()); got != want {
		t.Error(got)
	}
}

func TestScheduleGivesTheOrder(t *testing.T) {
	s := array(f32, 8)
	const high = 1 << 32 // newer plugins put the computation's number there
	entry := comp(1, "entry", high|3, inst(high|1, "parameter", s),
		inst(high|2, "all-gather", s, high|1), inst(high|3, "all-reduce", s, high|1))
	order := func(ids ...int64) string {
		sequence := msg(nil).Int(1, 1).Bytes(2, msg(nil).Packed(1, ids...))
		m := mustRead(t, module(entry).Bytes(7, msg(nil).Bytes(1, sequence)))
		var kinds []string
		for _, c := range m.Collectives() {
			kinds = append(kinds, string(c.Kind))
		}
		return strings.Join(kinds, " ")
	}
	if got := order(high|1, high|3, high|2); got != "all-reduce all-gather" {
		t.Error(got)
	}
	for _, bad := range [][]int64{
		{}, {high | 3, high | 2}, {high | 3, high | 3, high | 2}, {7, 8, 9},
	} {
		if got := order(bad...); got != "all-gather all-reduce" {
			t.Errorf("schedule %v is believed: %s", bad, got)
		}
	}
}

func TestTypesThatDeepwellLacks(t *testing.T) {
	fnuz := array(23, 3, 5) // f8e4m3b11fnuz
	m := mustRead(t, module(comp(1, "entry", 5, inst(1, "parameter", array(token)),
		inst(2, "parameter", fnuz).Int(9, 1), inst(3, "parameter", array(99, 4)).Int(9, 2),
		inst(4, "all-to-all", fnuz, 2).Packed(14, 0),
		inst(5, "tuple", tupleOf(array(token), tupleOf(array(26, 3)), tupleOf()), 1, 2))))
	texts := func(list []Value) (all []string) {
		for _, v := range list {
			all = append(all, fmt.Sprintf("%s %d %v", v.Text, v.Bytes, v.Shape.Type))
		}
		return all
	}
	if got := texts(m.Params); !slices.Equal(got,
		[]string{"token[] 0 invalid", "f8e4m3b11fnuz[3,5] 15 invalid", "type99[4] 0 invalid"}) {
		t.Errorf("parameters %q", got)
	}
	if got := texts(m.Results); !slices.Equal(got, []string{"token[] 0 invalid", "s2[3] 3 invalid"}) {
		t.Errorf("results %q", got)
	}
	c := m.Collectives()[0]
	if c.Type != dtype.Invalid || c.Shape != "f8e4m3b11fnuz[3,5]" || c.Bytes() != 15 {
		t.Errorf("%+v", c)
	}
}

func TestAliasesAndDonors(t *testing.T) {
	s := array(f32, 8)
	result := tupleOf(s, tupleOf(s, s), s)
	base := module(comp(1, "entry", 3, inst(1, "parameter", s), inst(2, "parameter", s).Int(9, 1),
		inst(3, "tuple", result, 1, 2)))
	alias := func(param, kind int64, path ...int64) msg {
		return msg(nil).Bytes(1, msg(nil).Packed(1, path...).Int(2, param).Int(4, kind))
	}
	donor := func(param int64) msg { return msg(nil).Bytes(1, msg(nil).Int(1, param)) }
	m := mustRead(t, base.Bytes(8, append(alias(0, 1, 1, 1), alias(1, 2, 2)...)).Bytes(18, donor(1)))
	if want := []Alias{{2, 0, false}, {3, 1, true}}; !slices.Equal(m.Aliases, want) {
		t.Errorf("aliases %v, want %v", m.Aliases, want)
	}
	if m.Params[0].Donor || !m.Params[1].Donor {
		t.Error("parameter 1 is the donor")
	}
	for name, bad := range map[string]msg{
		"no such result":    base.Bytes(8, alias(0, 1, 7)),
		"a tuple":           base.Bytes(8, alias(0, 1, 1)),
		"below an array":    base.Bytes(8, alias(0, 1, 0, 0)),
		"no such parameter": base.Bytes(8, alias(2, 1, 0)),
		"no such donor":     base.Bytes(18, donor(-1)),
	} {
		if _, err := Read("hlo", bad); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func TestWorkspaceIsOnlyThatOfALibrary(t *testing.T) {
	result := tupleOf(array(f32, 8), array(6, 100))
	for target, want := range map[string]int64{"__cudnn$norm": 100, "deepwell.quantize": 0} {
		m := mustRead(t, module(comp(1, "entry", 2, inst(1, "parameter", array(f32, 8)),
			inst(2, "custom-call", result, 1).Text(28, target))))
		c := m.CustomCalls()[0]
		if c.Workspace != want || c.ResultBytes != 132-want || c.Plan != PlanUnknown {
			t.Errorf("%s: %+v", target, c)
		}
	}
}

func TestAllocationIsNoKernel(t *testing.T) {
	m := mustRead(t, module(comp(1, "entry", 1,
		inst(1, "custom-call", array(f32, 8)).Text(28, AllocateBuffer))))
	if calls := m.CustomCalls(); len(calls) > 0 {
		t.Errorf("%+v", calls)
	}
}

func TestErrorsSayWhatIsWrong(t *testing.T) {
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	call := func(id int64) msg { return inst(2, "call", s, 1).Packed(38, id) }
	chain := []msg{}
	for id := range int64(2000) {
		chain = append(chain, comp(id+1, fmt.Sprint("c", id), 1, param, call(id+2)))
	}
	deep := s
	for range 100 {
		deep = tupleOf(deep)
	}
	entry := func(list ...msg) msg { return module(comp(1, "entry", 1, list...)) }
	flat := array(f32, make([]int64, 129)...)
	for want, code := range map[string]msg{
		"no entry computation":   nil,
		"protocol buffer":        msg("\xff"),
		"no instructions":        entry(),
		"no opcode":              entry(inst(1, "", s)),
		"no result":              module(comp(1, "entry", 9, param)),
		"calls itself":           entry(param, call(2)).Bytes(3, comp(2, "b", 1, param, call(1))),
		"which is not there":     entry(param, call(7)),
		"two computations":       entry(param).Bytes(3, comp(1, "other", 1, param)),
		"more than 1000 deep":    module(chain...),
		"deeper than 32 tuples":  entry(inst(1, "parameter", deep)),
		"129 dimensions":         entry(inst(1, "parameter", flat)),
		"not a body":             entry(param, inst(2, "while", s, 1).Packed(38, 1)),
		"operand 5":              entry(param, inst(2, "all-reduce", s, 5)),
		"parameter 0":            entry(inst(1, "parameter", s).Int(9, 3)),
		"names axis 4 of a mesh": entry(param.Bytes(93, msg(nil).Bytes(2, msg(nil).Int(1, 4)))),
	} {
		_, err := Read("hlo", code)
		e, ok := errors.AsType[*diag.Error](err)
		if !ok || e.Code != diag.ProgramRead || !strings.Contains(e.What, want) || e.Fix == "" {
			t.Errorf("%s: got %v", want, err)
		}
	}
	if _, err := Read("mlir", nil); err == nil || !strings.Contains(err.Error(), `"mlir"`) {
		t.Errorf("format mlir: %v", err)
	}
}

// Each of 200 computations calls the next twice, in a loop of a million: 2²⁰⁰ paths.
func TestManyPathsAreNotWalked(t *testing.T) {
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	million := `{"known_trip_count":{"n":"1000000"}}`
	var comps []msg
	for id := int64(1); id <= 200; id++ {
		comps = append(comps, comp(id, fmt.Sprint("c", id), 1, param, loop(2, id+1, 202, million),
			inst(3, "call", s, 1).Packed(38, id+1)))
	}
	comps = append(comps, comp(201, "last", 2, param, inst(2, "all-reduce", s, 1)),
		comp(202, "condition", 1, param))
	start := processorTime(t)
	m := mustRead(t, module(comps...))
	if took := processorTime(t) - start; took > time.Second {
		t.Errorf("it took %v", took)
	}
	if got := m.Collectives()[0].Count; got != math.MaxInt64 {
		t.Errorf("count %d is not saturated", got)
	}
}

// processorTime is what the process has used: unlike the clock, it does not run while others do.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What is written once and named many times must cost once: each of these programs is some
// hundred kilobytes, and reading it naively takes minutes or gigabytes.
func TestSharingStaysLinear(t *testing.T) {
	const many = 100_000
	s := array(f32, 8)
	wide := slices.Repeat([]msg{msg(nil)}, many) // a tuple of many elements of two bytes
	big := inst(1, "parameter", tupleOf(wide...))
	ones := slices.Repeat([]int64{1}, many)
	rank := array(f32, slices.Repeat([]int64{1 << 60}, maxRank)...)
	payload := `{"x":"` + strings.Repeat("y", many) + `"}`
	var aliases, users msg
	for range 30_000 {
		aliases = aliases.Bytes(1, msg(nil).Packed(1, many-1))
		users = users.Bytes(2, inst(2, "all-reduce", s, 1).Bytes(99, msg(nil).Int(2, 0)))
	}
	for name, code := range map[string]msg{
		"operands of a call": module(comp(1, "entry", 1, big,
			inst(2, "custom-call", s, ones...))),
		"operands of a sum": module(comp(1, "entry", 1, inst(1, "parameter", rank),
			inst(2, "all-reduce", tupleOf(wide...), ones...))),
		"aliases": module(comp(1, "entry", 1, big)).Bytes(8, aliases),
		"payloads": module(append(comp(1, "entry", 1, inst(1, "parameter", s)), users...)).
			Text(22, payload),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		start := processorTime(t)
		m, err := Read("hlo", code)
		took := processorTime(t) - start
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(name, err)
		}
		allocated := after.TotalAlloc - before.TotalAlloc
		t.Logf("%s: %d bytes, %v, %d MB allocated", name, len(code), took, allocated>>20)
		if took > 3*time.Second || allocated > 200<<20 {
			t.Errorf("%s: %v and %d MB for %d bytes", name, took, allocated>>20, len(code))
		}
		runtime.KeepAlive(m)
	}
}
