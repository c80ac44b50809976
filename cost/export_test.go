package cost

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// Built is the bill of a graph that was built for the very sizes of a cut.
func Built(c *model.Config, cut Cut) (*Bill, error) {
	b := New(c, "sm_100", nil)
	s, err := b.build(cut)
	if err != nil {
		return nil, err
	}
	return s.bill(cut), nil
}

// List gives the tags of a set.
func (t Tags) List() []ir.Tag { return t.list() }
