package price

import (
	_ "embed"
	"math"
	"strconv"
	"strings"
	"sync"
)

// The tables are condensed from XLA's own (openxla/xla e5d008bb03d9, xla/service/gpu/model):
// matmul.csv has the rates of default_matmul_perf_table.txtpb with one batch in TFLOP/s, by sizes;
// collective.csv the times of default_collective_perf_table.txtpb in microseconds, by bytes,
// interpolated between sizes and made monotone.
var (
	//go:embed tables/matmul.csv
	matmulText string
	//go:embed tables/collective.csv
	collectiveText string
)

// cells are the fields of a table's lines, without the first line.
func cells(text string) [][]string {
	var rows [][]string
	for line := range strings.Lines(text) {
		rows = append(rows, strings.Split(strings.TrimSpace(line), ","))
	}
	return rows[1:]
}

// number reads a field of an embedded table, which a test has read before.
func number(s string) float64 {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// A grid has a number for each of the sizes 256, 512, ... 4096 along each of m, n and k.
const gridSide = 5

type grid [gridSide][gridSide][gridSide]float64

// gemmRates are the rates by architecture and type, in operations a second.
var gemmRates = sync.OnceValue(func() map[[2]string]*grid {
	list := map[[2]string]*grid{}
	for i, row := range cells(matmulText) {
		key := [2]string{row[0], row[1]}
		if list[key] == nil {
			list[key] = new(grid)
		}
		m, n := i/gridSide%gridSide, i%gridSide
		for k := range gridSide {
			list[key][m][n][k] = number(row[4+k]) * 1e12
		}
	}
	return list
})

// times converts rates to log seconds, monotonically: a larger GEMM never takes less time than a
// smaller one, since a faster measurement is noise. No rate exceeds the GPU's peak; the table of
// sm_90 has 2,593 TFLOP/s for FP8, where the peak is 1,979.
func times(arch, kind string, peak float64) *grid {
	rates := gemmRates()[[2]string{arch, kind}]
	if rates == nil {
		return nil
	}
	g := new(grid)
	for i := range gridSide {
		for j := range gridSide {
			for k := range gridSide {
				work := 2 * math.Exp2(float64(3*8+i+j+k))
				t := math.Log(work / min(rates[i][j][k], peak))
				for _, d := range [][3]int{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}} {
					if i >= d[0] && j >= d[1] && k >= d[2] {
						t = max(t, g[i-d[0]][j-d[1]][k-d[2]])
					}
				}
				g[i][j][k] = t
			}
		}
	}
	return g
}

// place gives the cell below a size, how far it lies towards the next by logarithm, and how many
// times the largest of the table it is.
func place(size float64) (i int, between, beyond float64) {
	x := math.Log2(max(size, 1)) - 8
	last := float64(gridSide - 1)
	beyond = math.Exp2(max(x-last, 0))
	x = min(max(x, 0), last)
	i = min(int(x), gridSide-2)
	return i, x - float64(i), beyond
}

// seconds interpolates between eight cells. Below the table a product takes as long as the smallest
// one, since a tile of the tensor cores is as large; beyond it the rate stays.
func (g *grid) seconds(m, n, k float64) float64 {
	i, a, x := place(m)
	j, b, y := place(n)
	l, c, z := place(k)
	at := func(i, j int) float64 { return g[i][j][l]*(1-c) + g[i][j][l+1]*c }
	t := (at(i, j)*(1-b)+at(i, j+1)*b)*(1-a) + (at(i+1, j)*(1-b)+at(i+1, j+1)*b)*a
	return math.Exp(t) * x * y * z
}

// A curve is the times of a collective by bytes: 4 KiB, 16 KiB, ... 1 GiB.
type curve [10]float64

// time interpolates on a logarithmic scale; beyond the ends the time stays, or grows with bytes.
func (c *curve) time(bytes float64) float64 {
	x := math.Log2(bytes/4096) / 2
	last := len(c) - 1
	switch {
	case x <= 0:
		return c[0]
	case x >= float64(last):
		return c[last] * math.Exp2(2*(x-float64(last)))
	}
	i := int(x)
	w := x - float64(i)
	return c[i] * math.Pow(c[i+1]/c[i], w)
}

// A link is one row of the table of collectives.
type link struct {
	gpu  string
	kind Kind
	size int
}

// curves are the times of collectives inside an NVLink domain.
var curves = sync.OnceValue(func() map[link]*curve {
	list := map[link]*curve{}
	for _, row := range cells(collectiveText) {
		c := new(curve)
		for i := range c {
			c[i] = number(row[3+i]) * 1e-6
		}
		list[link{row[0], Kind(row[1]), int(number(row[2]))}] = c
	}
	return list
})
