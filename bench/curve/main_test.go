package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/event"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Curves of either form are read, and are judged by the step that is farthest apart.
func TestRun(t *testing.T) {
	var b strings.Builder
	sink := event.NewJSON(&b, func() time.Time { return time.Unix(0, 0) })
	for i, loss := range []float64{8, 6, 4, 2} {
		sink.Emit(event.Step{Step: i + 1, Loss: event.Figure(loss)})
	}
	ours := write(t, "events.jsonl", b.String())
	for _, c := range []struct {
		csv  string
		ok   bool
		want string
	}{
		{"step,loss,norm\n1,8,1\n2,6.03,1\n3,4,1\n", true, "3 steps, 1 to 3"},
		{"norm,loss,step\n1,8,1\n1,6,2\n1,4.2,3\n", false, "4.76 % apart (step 3)"},
		{"step,loss\n1,8\n2,NaN\n", false, "NaN"},
	} {
		var out strings.Builder
		ok, err := run(&out, ours, write(t, "torch.csv", c.csv), 0.01, 2)
		if err != nil || ok != c.ok || !strings.Contains(out.String(), c.want) {
			t.Errorf("%q: %v, %v\n%s", c.csv, ok, err, &out)
		}
	}
	for _, csv := range []string{"", "loss\n1\n", "step,loss\nx,1\n", "step,loss\n1,x\n",
		"step,loss\n9,1\n"} {
		if _, err := run(&strings.Builder{}, ours, write(t, "torch.csv", csv), 0.01, 2); err == nil {
			t.Errorf("%q: no error", csv)
		}
	}
}

func TestMeans(t *testing.T) {
	for i, want := range []float64{1, 1.5, 2.5, 3.5} {
		if got := means([]float64{1, 2, 3, 4}, 2)[i]; math.Abs(got-want) > 1e-15 {
			t.Errorf("mean %d is %v, want %v", i, got, want)
		}
	}
}
