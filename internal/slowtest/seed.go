package slowtest

import (
	"math/rand/v2"
	"os"
	"testing"
)

// fixed is the seed of tests that draw, unless a seed is given: CI is a function of the commit.
const fixed = 1

// Seed gives the seed of a test that draws what it tries, and logs it: the flag of that name if it
// is not 0, a random one with DEEPWELL_SEED=random in the environment, as in .ci/full, else always
// the same.
func Seed(t testing.TB, name string, flag uint64) uint64 {
	t.Helper()
	switch {
	case flag != 0:
	case os.Getenv("DEEPWELL_SEED") == "random":
		flag = rand.Uint64()
	default:
		flag = fixed
	}
	t.Logf("-%s=%d", name, flag)
	return flag
}
