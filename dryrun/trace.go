package dryrun

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/deepwell/deepwell/internal/trace"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// kindNames are the names of kinds that people see, in the order of the constants.
var kindNames = [4]string{"forward", "backward", "input gradient", "weight gradient"}

// Trace writes the timeline as a file that Perfetto and Chrome open: for each rank a track of its
// actions and one of its sends, and a counter of what it holds by cause, in GiB.
func (t *Timeline) Trace(w io.Writer) error {
	at := int64(0)
	moment := func(tick int64) time.Time { return time.Unix(0, tick).UTC() }
	out := trace.New(w, func() time.Time { return moment(at) })
	// Perfetto sorts groups by their names, so that numbers have as many digits as the last.
	digits := len(strconv.Itoa(max(0, len(t.Schedule.Lists)-1)))
	for rank, list := range t.Schedule.Lists {
		group := fmt.Sprintf("rank %0*d", digits, rank)
		actions := out.Track(group, "actions")
		for place, a := range list {
			span := t.Spans[rank][place]
			actions.Add(fmt.Sprintf("%s %d", kindNames[a.Kind], a.Microbatch), moment(span.Start),
				moment(span.End), trace.Arg{Name: "stage", Value: a.Stage},
				trace.Arg{Name: "microbatch", Value: a.Microbatch})
		}
		for up, name := range []string{"sends down", "sends up"} {
			sends := out.Track(group, name)
			for _, s := range t.sends(rank, up == 1) {
				sends.Add(s.name, moment(s.Start), moment(s.End))
			}
		}
		from := t.tails[rank].computed
		for _, x := range t.tails[rank].parts() {
			if x.ticks > 0 {
				actions.Add(x.name, moment(from), moment(from+x.ticks))
			}
			from += x.ticks
		}
		for _, m := range t.Memory(rank) {
			at = m.At
			for _, cause := range shown(m.Memory) {
				out.Count(group, cause.Name+" GiB", float64(cause.Bytes)/(1<<30))
			}
		}
	}
	return out.Close()
}

// A part is one thing of a tail.
type part struct {
	name  string
	ticks int64
}

func (x tail) parts() []part {
	return []part{{"reduce gradients", x.reduce}, {"optimizer", x.update}, {"host", x.host}}
}

// shown is the causes of memory that are drawn, from the bottom of a picture to its top, by the
// names that [program.Memory.Causes] has; classes are their colours.
func shown(m program.Memory) (list [5]program.Cause) {
	list = [5]program.Cause{{Name: "params"}, {Name: "optimizer"}, {Name: "gradients"},
		{Name: "activations"}, {Name: "temp"}}
	for _, c := range m.Causes() {
		at := slices.IndexFunc(list[:], func(o program.Cause) bool { return o.Name == c.Name })
		switch c.Name {
		case "copies":
			at = 0
		case "runtime":
			at = 4
		}
		list[at].Bytes += c.Bytes
	}
	return list
}

// A sendSpan is a result on its way.
type sendSpan struct {
	name string
	schedule.Span
}

// sends lists when the link of a rank carries what: activations down the pipeline, or gradients up.
func (t *Timeline) sends(rank int, up bool) []sendSpan {
	var list []sendSpan
	free := int64(0)
	for place, a := range t.Schedule.Lists[rank] {
		to := a.Stage + 1
		if up {
			to = a.Stage - 1
		}
		if a.Kind == schedule.Weight || up == (a.Kind == schedule.Forward) ||
			to < 0 || to >= len(t.send) || t.Schedule.Rank(to) == rank || t.send[a.Stage] == 0 {
			continue
		}
		from := max(free, t.Spans[rank][place].End)
		free = from + t.send[a.Stage]
		list = append(list, sendSpan{fmt.Sprintf("%s to rank %d", a, t.Schedule.Rank(to)),
			schedule.Span{Start: from, End: free}})
	}
	return list
}
