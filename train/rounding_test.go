package train

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// A run whose gradients were rounded by other random bits is not resumed; one that rounds none by
// chance is, whatever its checkpoint says.
func TestOtherRoundingIsRefused(t *testing.T) {
	for format, refused := range map[string]bool{"nvfp4": true, "mxfp8": false} {
		p := &precision.Policy{Layers: 2, Rules: []precision.Rule{{Linears: []string{"mlp"}, To: 2,
			Format: dtype.Format(format)}}}
		run := &Trainer{programs: &step.Programs{Policy: p}, opts: Options{Recipe: &recipe.Recipe{}}}
		if err := run.sameRounding(block.RoundingVersion); err != nil {
			t.Errorf("%s: %v", format, err)
		}
		err := run.sameRounding(1)
		if (err != nil) != refused {
			t.Errorf("%s: version 1 gives %v", format, err)
		}
		if refused && (diag.From(err).Code != diag.RecipeChanged ||
			!strings.Contains(err.Error(), "version 1 of stochastic rounding")) {
			t.Errorf("%s: %v", format, err)
		}
	}
}
