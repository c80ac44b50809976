// Command prices compares the cost model's prices of quantized linear layers with published ones:
// TransformerEngine's GEMMs with and without quantization, torchao's quantizing kernels and step,
// Megatron-Bridge's steps. How fast a format is was chosen by none of these rows (how fast a GB300
// is beside a GB200 was, by Megatron-Bridge's); prices are named by the hashes of their sources, so
// that it can be seen whether they were chosen before. Beside each stands what the simplest model
// says: the ratio of data sheets' FLOP rates, or the data sheet's bandwidth.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/price"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "prices:", err)
		os.Exit(1)
	}
}

func run() error {
	for _, path := range []string{"price", "machine", "kernels/work.go", "estimate"} {
		out, err := exec.Command("git", "rev-parse", "HEAD:"+path).Output()
		if err != nil {
			return err
		}
		fmt.Printf("%-16s %s\n", path, strings.TrimSpace(string(out)))
	}
	for _, part := range []func() error{layers, quantizers, steps} {
		fmt.Println()
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

// own gives our prices of a cluster.
func own(cluster string) (machine.Cluster, *price.Prices, error) {
	c, err := machine.ParseCluster(cluster)
	if err != nil {
		return c, nil, err
	}
	prof, err := price.Find(price.Own)
	if err != nil {
		return c, nil, err
	}
	return c, price.New(c, prof), nil
}

// peaks is how many times the FLOP rate of one format the data sheet says of another.
func peaks(c machine.Cluster, f, over dtype.Format) float64 {
	return c.GPU.Peak.Of(f) / c.GPU.Peak.Of(over)
}

// against prints a ratio beside a published one.
func against(got, published float64) string {
	return fmt.Sprintf("%.2f of %.2f (%+.0f %%)", got, published, 100*(got/published-1))
}
