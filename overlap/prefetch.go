package overlap

import (
	"slices"

	"github.com/deepwell/deepwell/hlo"
)

// gathers tells, for each kind of group, how much a round of a loop gathers and how much of that is
// for the next round: it leaves the body as a value that goes round, untouched by any kernel but
// copies.
func (p *player) gathers(body *hlo.Computation) []Gather {
	var list []Gather
	row := func(c hlo.Collective, fabric string) *Gather {
		for n := range list {
			if list[n].Group == c.Group {
				return &list[n]
			}
		}
		list = append(list, Gather{Group: c.Group, Fabric: fabric})
		return &list[len(list)-1]
	}
	ahead := carried(body)
	for n := range body.Body {
		rows, domain := sent(&body.Body[n])
		for k, c := range rows {
			if c.Kind != hlo.AllGather {
				continue
			}
			g := row(c, p.wire.travel(rows, domain).fabric)
			g.Bytes += c.ResultBytes
			if ahead[[2]int{n, k}] || ahead[[2]int{n, wholeTuple}] {
				g.Ahead += c.ResultBytes
			}
		}
	}
	return list
}

// wholeTuple stands for every tensor of a combined collective.
const wholeTuple = -1

// carried finds the starts of collectives whose results a body hands to its next round, and which
// of their tensors.
func carried(body *hlo.Computation) map[[2]int]bool {
	found := map[[2]int]bool{}
	if body.Root < 0 || body.Body[body.Root].Opcode != "tuple" {
		return found
	}
	used := elementsUsed(body)
	for element, at := range body.Body[body.Root].Operands {
		if used[element] {
			start, tensor := origin(body, at) // -1: no collective
			found[[2]int{start, tensor}] = true
		}
	}
	return found
}

// elementsUsed tells which of the values that go round the next round takes out and uses.
func elementsUsed(body *hlo.Computation) map[int]bool {
	reads := make([]bool, len(body.Body))
	for n := range body.Body {
		for _, o := range body.Body[n].Operands {
			reads[o] = true
		}
	}
	used := map[int]bool{}
	for n, i := range body.Body {
		if i.Opcode == "get-tuple-element" && reads[n] &&
			body.Body[i.Operands[0]].Opcode == "parameter" {
			used[i.Index] = true
		}
	}
	return used
}

// origin follows a value back to the start of the collective that computed it, through copies,
// bitcasts and tuples; -1 if another kernel computed it, or if the loop only carries it along.
func origin(c *hlo.Computation, at int) (start, tensor int) {
	tensor = wholeTuple
	for {
		i := &c.Body[at]
		if list, _ := sent(i); len(list) > 0 {
			return at, tensor
		}
		if len(i.Operands) != 1 || i.Operands[0] >= at || !slices.Contains(handsOn, i.Opcode) {
			return -1, tensor
		}
		if i.Opcode == "get-tuple-element" {
			tensor = i.Index
		}
		at = i.Operands[0]
	}
}

// handsOn are the instructions that give what they are given.
var handsOn = []string{"copy", "bitcast", "reshape", "get-tuple-element", "optimization-barrier",
	"async-done", "async-update", "all-gather-done"}
