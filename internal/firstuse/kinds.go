package firstuse

import (
	"context"
	"fmt"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
)

// A Kernel is one of our own, as the specification in its call says it.
type Kernel struct {
	Key     string  // by which programs do without it
	Small   string  // the specification that is compared: equal ones are compared once
	Limit   float64 // how far it may be from its plain form
	compare func(ctx context.Context, e *engine.Engine, seed uint64) (apart float64, err error)
}

// specified is what specifications of all kinds have.
type specified interface {
	Key() string
	String() string
}

// kindOf makes a row of the table of kinds.
func kindOf[T specified](parse func(string) (T, error), small func(T) T, limit float64,
	compare func(context.Context, *engine.Engine, T, uint64) (float64, error)) func(string) (Kernel,
	error) {
	return func(text string) (Kernel, error) {
		s, err := parse(text)
		if err != nil {
			return Kernel{}, err
		}
		less := small(s)
		return Kernel{s.Key(), less.String(), limit, func(ctx context.Context, e *engine.Engine,
			seed uint64) (float64, error) {
			return compare(ctx, e, less, seed)
		}}, nil
	}
}

// kinds are the kinds of kernels, one row each; the last has no word of its own in front.
var kinds = []func(string) (Kernel, error){
	kindOf(fused.ParseGroup, SmallGroup, Limit, compareGroup),
	kindOf(fused.ParseLoss, SmallLoss, Limit, compareLoss),
	kindOf(rownorm.Parse, SmallNorm, Limit, compareNorm),
	kindOf(flash.Parse, SmallAttention, attentionLimit, compareAttention),
	kindOf(fused.ParseSpec, Small, Limit, compareSpec),
}

// Find gives the kernel of a specification.
func Find(text string) (k Kernel, err error) {
	for _, kind := range kinds {
		if k, err = kind(text); err == nil {
			return k, nil
		}
	}
	return Kernel{}, fmt.Errorf("the plain form of %q is not known: %w", text, err)
}
