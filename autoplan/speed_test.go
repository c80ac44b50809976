package autoplan

import (
	"testing"
)

// BenchmarkSearch reports the CPU seconds of a search, the plans it priced or pruned by a bound,
// and how many of these it priced.
func BenchmarkSearch(b *testing.B) {
	for _, c := range []struct {
		name, model, cluster string
		seq, tokens          int64
	}{
		{"405b-1024", "llama3.1-405b", "1024xgb200", 8192, 16 << 20},
		{"405b-960", "llama3.1-405b", "960xb200", 8192, 16 << 20},
		{"405b-100000", "llama3.1-405b", "100000xgb200", 8192, 0},
		{"70b-256", "llama3.1-70b", "256xb200", 8192, 4 << 20},
		{"8b-64", "llama3.1-8b", "64xb200", 8192, 4 << 20},
		{"deepseek-1024", "deepseek-v3", "1024xgb200", 4096, 64 << 20},
	} {
		b.Run(c.name, func(b *testing.B) {
			j := jobFor(b, c.model, c.cluster, c.seq, c.tokens)
			before, priced, weighed := spent(b), int64(0), int64(0)
			for b.Loop() {
				r, err := Search(b.Context(), j)
				if err != nil {
					b.Fatal(err)
				}
				priced, weighed = priced+r.Priced, weighed+r.Weighed
			}
			cpu := (spent(b) - before).Seconds()
			b.ReportMetric(cpu/float64(b.N), "cpu-s/op")
			b.ReportMetric(float64(weighed)/cpu, "weighed/cpu-s")
			b.ReportMetric(float64(priced)/cpu, "priced/cpu-s")
		})
	}
}
