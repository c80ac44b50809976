package precision

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/model"
)

// IsFile reports whether a name is the path of a policy, not a format.
func IsFile(name string) bool { return strings.HasSuffix(name, ".json") }

// maxText bounds the file of a policy: every GEMM of a thousand layers takes a tenth of it.
const maxText = 4 << 20

// Load returns the policy of a format's name ([Default]) or of a file, for a model.
func Load(m model.Model, name string) (*Policy, error) {
	if !IsFile(name) {
		return Default(m, name)
	}
	text, err := safedir.ReadPlain(name, maxText)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read the policy").At("%s", name).Wrap(err)
	}
	p, err := Parse(text, name)
	if err != nil {
		return nil, err
	}
	if err := p.Check(m); err != nil {
		e := diag.From(err)
		return nil, e.At("%s", strings.TrimSuffix(name+", "+e.Where, ", "))
	}
	return p, nil
}

// Narrowest is the policy's format with the fewest bits, which is the precision of its plan.
func (p *Policy) Narrowest() dtype.Format {
	for _, f := range slices.Backward(formats) {
		if p.Has(f) {
			return f
		}
	}
	return dtype.FormatBF16
}
