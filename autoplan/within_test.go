package autoplan

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/deepwell/deepwell/estimate"
)

// An estimator that has priced many plans, and keeps what it worked out, gives each the same price
// to the last bit as one that has priced none; limits change no verdict.
func TestPricesDoNotDependOnTheOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(6, 0))
	for _, name := range []string{"llama3.1-405b", "gemma2-27b", "deepseek-v3"} {
		j, err := jobFor(t, name, "1024xgb200", 4096, 64<<20).filled()
		if err != nil {
			t.Fatal(err)
		}
		used, err := estimate.New(j.Config, j.Cluster, j.Profile)
		if err != nil {
			t.Fatal(err)
		}
		for n := 0; n < 60; {
			p, ok := randomPlan(random, &j)
			if !ok {
				continue
			}
			n++
			fresh, err := estimate.New(j.Config, j.Cluster, j.Profile)
			if err != nil {
				t.Fatal(err)
			}
			want, err := fresh.Price(p)
			if err != nil {
				t.Fatal(err)
			}
			got, err := used.Price(p)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("%v: %+v, then %+v, %v", p, want, got, err)
			}
			for _, most := range []estimate.Limits{{Peak: want.Peak}, {Peak: want.Peak - 1},
				{Step: want.Step}, {Step: want.Step / 1.5}} {
				got, whole, err := used.Within(p, most)
				fits := most.Peak == 0 || want.Peak <= most.Peak
				slow := most.Step > 0 && want.Step > most.Step
				switch {
				case err != nil || got.Peak != want.Peak || got.Memory != want.Memory:
					t.Fatalf("%v: %+v, %v", p, got, err)
				case whole && got.Step != want.Step || got.Step > want.Step:
					t.Fatalf("%v takes %v s, not %v", p, want.Step, got.Step)
				case !whole && fits && !slow:
					t.Fatalf("%v is within %+v", p, most)
				}
			}
		}
	}
}
