package machine

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/golden"
)

func TestCatalogueIsConsistent(t *testing.T) {
	seen := map[string]string{}
	for _, c := range GPUModels() {
		for _, s := range append([]string{c.Name}, c.aliases...) {
			if s != fold(s) {
				t.Errorf("%s: spelling %q is not folded", c.Name, s)
			}
			if other := seen[s]; other != "" {
				t.Errorf("%q is both %s and %s", s, other, c.Name)
			}
			seen[s] = c.Name
		}
		if found, err := FindGPUModel(c.device.Name); err != nil || found.Name != c.Name {
			t.Errorf("the driver's name %q finds %q, %v", c.device.Name, found.Name, err)
		}
		cc := fmt.Sprintf("%d.%d", c.device.Major, c.device.Minor)
		if strings.TrimSuffix(c.ComputeCapability, "a") != cc ||
			c.Arch != "sm_"+strings.ReplaceAll(cc, ".", "") {
			t.Errorf("%s: %s, %s and %s do not agree", c.Name, c.ComputeCapability, c.Arch, cc)
		}
		if c.UsableBytes >= c.MemoryBytes || c.UsableBytes < c.MemoryBytes*98/100 {
			t.Errorf("%s: %d of %d bytes are usable", c.Name, c.UsableBytes, c.MemoryBytes)
		}
		// XLA's bandwidth comes from clock and bus, the other from the data sheet.
		if r := float64(c.device.Bandwidth) / float64(c.MemoryBandwidth); r < 0.98 || r > 1.02 {
			t.Errorf("%s: two bandwidths %.3f apart", c.Name, r)
		}
		if (c.NVLink > 0) != (c.device.Links > 0) || (c.NVLink > 0) != (c.NVLinkDomain > 1) {
			t.Errorf("%s: has NVLink and has not", c.Name)
		}
		if blackwell := c.device.Major >= 10; c.MXFP8 != blackwell || c.NVFP4 != blackwell ||
			(c.Peak.MXFP8 > 0) != blackwell || (c.Peak.NVFP4 > 0) != blackwell {
			t.Errorf("%s: block formats do not agree with its chip", c.Name)
		}
	}
}

// TestTensorPeaksFollowFromRates holds the two sources against each other: units, operations and
// clock as XLA has them, and the published peak.
func TestTensorPeaksFollowFromRates(t *testing.T) {
	for _, c := range GPUModels() {
		for _, r := range c.device.Matrix {
			if r.Primitive != 16 { // BF16
				continue
			}
			d := c.device
			peak := 2 * float64(d.Cores*r.Units*r.Ops) * float64(d.TensorClock) * 1e9
			if ratio := peak / c.Peak.BF16; ratio < 0.97 || ratio > 1.03 {
				t.Errorf("%s: rates give %.0f TFLOP/s, data sheet %.0f", c.Name, peak/1e12,
					c.Peak.BF16/1e12)
			}
		}
	}
}

func TestFindGPUModel(t *testing.T) {
	for spelling, want := range map[string]string{
		"b200": "b200", "B200-SXM": "b200", "NVIDIA B200": "b200", "GB200-NVL72": "gb200",
		"GB300 NVL72": "gb300", "RTX-PRO-6000-Blackwell": "rtx6000pro", "h100_sxm": "h100",
		"NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx6000pro",
		"NVIDIA H100 80GB HBM3":                        "h100", "H200-SXM": "h200",
		"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA B300 SXM6 AC": "b300",
	} {
		if c, err := FindGPUModel(spelling); err != nil || c.Name != want {
			t.Errorf("%q found %q, %v", spelling, c.Name, err)
		}
	}
	// GPUs that share a name with one of the catalogue but not its numbers.
	for _, other := range []string{"NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H200 NVL",
		"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA GeForce RTX 5090"} {
		if c, err := FindGPUModel(other); err == nil {
			t.Errorf("%q was taken for %s", other, c.Name)
		}
	}
}

func TestClusterErrors(t *testing.T) {
	for _, tt := range []struct {
		text string
		code diag.Code
		what string
		fix  string
	}{
		{"64xb2000", diag.GPUUnknown, `no GPU is called "b2000"; did you mean "b200"?`,
			"--cluster 64xb200"},
		{"gb20", diag.GPUUnknown, `no GPU is called "gb20"; did you mean "gb200"?`,
			"--cluster 1xgb200"},
		{"8xtpuv6e", diag.GPUUnknown, `no GPU is called "tpuv6e"`,
			"take one of b200, gb200, b300, gb300, rtx6000pro, h100, h200, a100, or cpu"},
		{"b200x8", diag.ClusterSpec, `"b200x8" is not a cluster`, "--cluster 8xb200"},
		{"8 b200", diag.ClusterSpec, `"8 b200" is not a cluster`, "--cluster 8xb200"},
		{"NVIDIA B200:16", diag.ClusterSpec, `"NVIDIA B200:16" is not a cluster`, "--cluster 16xb200"},
		{"gb200*72", diag.ClusterSpec, `"gb200*72" is not a cluster`, "--cluster 72xgb200"},
		{"cpux4", diag.ClusterSpec, `"cpux4" is not a cluster`, "--cluster 4xcpu"},
		{"gb200-nvl72", diag.ClusterSpec, `"gb200-nvl72" is a rack of 72 GPUs; how many GPUs are meant?`,
			"--cluster 72xgb200"},
		{"GB300 NVL72", diag.ClusterSpec, `"GB300 NVL72" is a rack of 72 GPUs; how many GPUs are meant?`,
			"--cluster 72xgb300"},
		{"8x", diag.ClusterSpec, `"8x" is not a cluster`, "--cluster 8xb200"},
		{"", diag.ClusterSpec, `"" is not a cluster`, "--cluster 8xb200"},
		{"0xb200", diag.ClusterSpec, `"0xb200" is not a cluster`, "--cluster 8xb200"},
		{"99999999999999999999xb200", diag.ClusterSpec,
			`"99999999999999999999xb200" is not a cluster`, "--cluster 8xb200"},
	} {
		_, err := ParseCluster(tt.text)
		e := diag.From(err)
		if e == nil || e.Code != tt.code || e.What != tt.what || e.Fix != tt.fix {
			t.Errorf("%q:\n got %v\nwant %s %s; fix: %s", tt.text, e, tt.code, tt.what, tt.fix)
		}
	}
	if !errors.Is(func() error { _, err := ParseCluster("8xzzz"); return err }(),
		diag.GPUUnknown) {
		t.Error("an unknown GPU has another code")
	}
}

func TestClusterShapes(t *testing.T) {
	for _, tt := range []struct{ text, topology, note string }{
		{"b200", "1x1x1", ""},
		{"6xb200", "1x1x6", ""},
		{"8xb200", "1x1x8", ""},
		{"16 x B200-SXM", "2x1x8", ""},
		{"65536xb200", "8192x1x8", ""},
		{"12xh100", "2x1x6", "12 H100 do not fill hosts of 8: taken as 2 hosts with 6 GPUs; " +
			"8 or 16 would fill them"},
		{"4xgb200", "1x1x4", ""},
		{"8xgb200", "1x2x4", ""},
		{"6xgb200", "1x2x3", "6 GB200 do not fill hosts of 4: taken as 2 hosts with 3 GPUs; " +
			"4 or 8 would fill them"},
		{"64×gb200", "1x16x4", ""},
		{"72xgb200", "1x18x4", ""},
		{"144xGB300-NVL72", "2x18x4", ""},
		{"100xgb200", "5x5x4", "100 GB200 do not fill NVLink domains of 72: taken as 5 domains " +
			"of 5 hosts with 4 GPUs; 72 or 144 would fill them"},
		{"8xrtx6000pro", "1x1x8", ""},
		{"32xrtx6000pro", "4x1x8", ""},
		{"8xcpu", "1x1x8", ""},
		{"CPU", "1x1x1", ""},
	} {
		c, err := ParseCluster(tt.text)
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		target := c
		if target.Topology() != tt.topology || c.Note != tt.note || target.Devices() != c.Count {
			t.Errorf("%q: %s with note %q", tt.text, target.Topology(), c.Note)
		}
		if byHand := (Cluster{GPU: c.GPU, Count: c.Count}); byHand.Topology() != tt.topology {
			t.Errorf("%q made by hand: %s", tt.text, byHand.Topology())
		}
	}
}

// TestClusterSplitIsBest checks the layout of every count against all others there are.
func TestClusterSplitIsBest(t *testing.T) {
	catalogue := append(GPUModels(), cpuModel())
	rapid.Check(t, func(t *rapid.T) {
		gpu := rapid.SampledFrom(catalogue).Draw(t, "gpu")
		count := rapid.IntRange(1, 3000).Draw(t, "count")
		c := newCluster(gpu, count)
		if again, err := ParseCluster(c.String()); err != nil || again.Topology() !=
			c.Topology() {
			t.Fatalf("%s reads back as %v, %v", c, again, err)
		}
		hosts := max(1, gpu.NVLinkDomain/gpu.GPUsPerHost)
		if c.Domains*c.HostsPerDomain*c.DevicesPerHost != count ||
			c.DevicesPerHost > gpu.GPUsPerHost || c.HostsPerDomain > hosts {
			t.Fatalf("%s became %s", c, c.Topology())
		}
		for d := 1; d <= min(gpu.GPUsPerHost, count); d++ {
			for h := 1; h <= hosts; h++ {
				if count%(d*h) == 0 && d*h > c.HostsPerDomain*c.DevicesPerHost {
					t.Fatalf("%s became %s; domains of %d are possible", c, c.Topology(), d*h)
				}
			}
		}
	})
}

func FuzzParseCluster(f *testing.F) {
	for _, s := range []string{"64xgb200", "b200", "8xcpu", "b200x8", "0xb200", "×", "8×", "xX",
		"1x1x1", "NVIDIA B200:8"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseCluster(text)
		if err != nil {
			if e := diag.From(err); e.Code == diag.Internal || e.Fix == "" {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if again, err := ParseCluster(c.String()); err != nil || again.String() != c.String() {
			t.Fatalf("%q became %q, which becomes %v, %v", text, c, again, err)
		}
	})
}

func TestConfigText(t *testing.T) {
	for _, name := range []string{"b200", "rtx6000pro"} {
		gpu, err := FindGPUModel(name)
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, filepath.Join("testdata", name+".txtpb"),
			[]byte(newCluster(gpu, 8).ConfigText("9.24.1.1")))
	}
	lines := regexp.MustCompile(
		`^( *)([a-z0-9_]+ \{|\}|[a-z0-9_]+: ("[^"\\]*"|[-0-9.e+]+|true|[A-Z_]+))$`)
	for _, c := range GPUModels() {
		text := newCluster(c, 8).ConfigText("")
		depth := 0
		for line := range strings.Lines(text) {
			m := lines.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
			if m == nil {
				t.Fatalf("%s: %q", c.Name, line)
			}
			if m[2] == "}" {
				depth--
			}
			if len(m[1]) != 2*depth {
				t.Fatalf("%s: %q at depth %d", c.Name, line, depth)
			}
			if strings.HasSuffix(m[2], "{") {
				depth++
			}
		}
		if depth != 0 || !strings.Contains(text, `dnn_version: "9.10.0"`) {
			t.Errorf("%s: unbalanced, or without a cuDNN:\n%s", c.Name, text)
		}
		extension := "feature_extension: NONE"
		if c.device.Major >= 9 {
			extension = "feature_extension: ACCELERATED_FEATURES"
		}
		if !strings.Contains(text, extension) {
			t.Errorf("%s lacks %s", c.Name, extension)
		}
	}
	if text := newCluster(cpuModel(), 8).ConfigText("9.24.1"); text != "" {
		t.Errorf("a processor has the text %q", text)
	}
}

func TestThreeNumbers(t *testing.T) {
	for in, want := range map[string]string{
		"9.24.1.1": "9.24.1", "9.24": "9.24.0", " 9.24.1\n": "9.24.1", "": oldestCuDNN,
		"9.x": oldestCuDNN, "v9.24.1": oldestCuDNN, "9.24.1rc1": oldestCuDNN, "10": "10.0.0",
		"09.1.2": "9.1.2", "-9.1.2": oldestCuDNN, `9.1."`: oldestCuDNN,
	} {
		if got := threeNumbers(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func TestCheckDriver(t *testing.T) {
	for _, tt := range []struct{ engine, version, want string }{
		{"cuda13", "580.65.06", ""},
		{"cuda13", "580.95.05", ""},
		{"cuda13", "610.43.02", ""},
		{"cuda13", "560.35.03", "driver 560.35.03 is too old for cuda13: update to >= 580.65.06"},
		{"cuda13", "580.65", "driver 580.65 is too old for cuda13: update to >= 580.65.06"},
		{"cuda13-run", "570.86.15", "driver 570.86.15 is too old for cuda13: update to >= 580.65.06"},
		{"cuda13", "", "no NVIDIA driver is known to be installed"},
		{"cpu", "", ""},
	} {
		got := ""
		if e := diag.From(CheckDriver(tt.engine, tt.version)); e != nil {
			if got = e.What; e.Code != diag.EngineLoad || e.Fix == "" {
				t.Errorf("%s %s: %v", tt.engine, tt.version, e)
			}
		}
		if got != tt.want {
			t.Errorf("%s %s: %q", tt.engine, tt.version, got)
		}
	}
}

func ExampleParseCluster() {
	c, _ := ParseCluster("64xGB200-NVL72")
	fmt.Println(c, "on", c.Hosts(), "hosts, topology", c.Topology())

	_, err := ParseCluster("b200x8")
	fmt.Print(diag.From(err).Format())
	// Output:
	// 64xgb200 on 16 hosts, topology 1x16x4
	// DW2402 "b200x8" is not a cluster
	//   fix    --cluster 8xb200
}
