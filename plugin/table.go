package plugin

import "runtime"

// An engine is one row of the table: what it is for, which wheels it comes from, and the digest
// of the files that must come out of them.
type engine struct {
	name    string
	version string // version of the package that holds the plugin
	purpose string // one sentence for people
	plugin  string // slash path of the PJRT plugin in the tree
	data    string // slash path of the CUDA data folder: bin/ptxas, nvvm/libdevice
	stub    string // slash path of the stand-in for libcuda, written where stubcuda can
	cudnn   string // version that cuDNN reports
	covers  string // another engine whose files these include
	wheels  []wheel
	trees   map[string]string // digest of the tree by host
}

// A wheel is one package of an engine.
type wheel struct {
	name, version string
	keep          []string // path.Match patterns; each must match a file
	pins          map[string]pin
}

// A pin is a wheel's file for one host.
type pin struct {
	sha256   string
	bytes    int64 // size of the wheel
	unpacked int64 // sum of the sizes of its entries: the most that unpacking may write
}

// Hosts that wheels are pinned for, as GOOS/GOARCH.
const (
	amd64 = "linux/amd64"
	arm64 = "linux/arm64"
)

// keepAlways are patterns that need not match: the licence travels with the files.
var keepAlways = []string{"*.dist-info/licenses/*", "*.dist-info/LICENSE*"}

// A catalogue is the table together with what it is read on. Tests have their own.
type catalogue struct {
	engines []engine
	host    string
	driver  func() bool // whether this host has a real NVIDIA driver
}

func builtin() *catalogue {
	return &catalogue{
		engines: engines(),
		host:    runtime.GOOS + "/" + runtime.GOARCH,
		driver:  hostHasDriver,
	}
}

// engines is the table. The CUDA packages have the versions that the package cuda-toolkit 13.4.3
// names, except cuBLAS: it names 13.8.0.4, and 13.8.2.12 is what cuDNN's plans were tried with.
// NCCL 2.30.7 exports every nccl function that the plugin names; no run speaks for that version.
// NVSHMEM is left out: the plugin holds the message "NVSHMEM is not supported in XLA".
func engines() []engine {
	return []engine{
		{
			name: "cpu", version: "0.0.1",
			purpose: "runs programs on the CPU, on as many virtual devices as asked for",
			plugin:  "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
			wheels:  []wheel{xlaCPU()},
			trees: map[string]string{
				amd64: "c062c6edbff3bb2fc793a16b5e60aea1035c1835d766a78d12cd700ba81ad305",
				arm64: "aaa39aa487769f8bbd023ce81efd1d6a56b604a0ecf0d8d331b4c08405cc0e87",
			},
		},
		{
			name: "cuda13", version: "0.12.0.1",
			purpose: "compiles programs for NVIDIA GPUs; needs neither a GPU nor a driver",
			plugin:  "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
			data:    "nvidia/cu13",
			stub:    "stub/libcuda.so.1",
			cudnn:   "9.24.1",
			wheels:  cudaCompile(),
			trees: map[string]string{
				amd64: "9effa18e453a17679d5ae6773ff5066c454c53367f4416269345fa00f70c8971",
				arm64: "ea2e9bd963447584a48ab62d0be74237a84687d31b6f4f362755392605d732e6",
			},
		},
		{
			name: "cuda13-run", version: "0.12.0.1",
			purpose: "compiles and runs programs on NVIDIA GPUs; includes cuda13",
			plugin:  "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
			data:    "nvidia/cu13",
			stub:    "stub/libcuda.so.1",
			cudnn:   "9.24.1",
			covers:  "cuda13",
			wheels:  cudaRun(),
			trees: map[string]string{
				amd64: "c80d3ad75bf8e485c2ea177459c7da3fbf33519b94c9e43114498d96080ecef4",
				arm64: "d54e048813c6c582613a20c7455ba55db5694bf64353ddb3c68538320c54ce38",
			},
		},
	}
}

func xlaCPU() wheel {
	return wheel{
		name: "xla-cpu-pjrt", version: "0.0.1",
		keep: []string{"xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"},
		pins: map[string]pin{
			amd64: {"55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc",
				63_461_052, 259_391_583},
			arm64: {"8f613be6e891858f40d64f9799319502fff42689661944fc18a6ffd8210b30c9",
				49_514_947, 200_435_256},
		},
	}
}

// cudaCompile lists what a compile without a GPU loads; see the package comment.
func cudaCompile() []wheel {
	return []wheel{
		{
			name: "jax-cuda13-pjrt", version: "0.12.0.1",
			keep: []string{"jax_plugins/xla_cuda13/xla_cuda_plugin.so"},
			pins: map[string]pin{
				amd64: {"5899bb6177eda86ea532afb9a26794f2bdd04966f6a01f9028266b16c2b6cf90",
					134_922_808, 395_990_587},
				arm64: {"40758d042df8c06991b6a1a8016b56e9cefb1ed4c677c062125c3eb71c3dab97",
					128_847_710, 376_094_060},
			},
		},
		{
			name: "nvidia-cuda-nvcc", version: "13.4.92",
			keep: []string{"nvidia/cu13/bin/ptxas"},
			pins: map[string]pin{
				amd64: {"a1f3bfb27299e060b444d5df1f4bcd762501326cf0fd3141ed61756816ab9a0e",
					47_672_022, 153_776_169},
				arm64: {"d6fc9f720c3b73b9e526f4c759dbc6581e1a300ba2c8191e3f0ed91c848a92c8",
					41_755_976, 135_569_763},
			},
		},
		{
			name: "nvidia-nvvm", version: "13.4.92",
			keep: []string{"nvidia/cu13/nvvm/libdevice/libdevice.10.bc"},
			pins: map[string]pin{
				amd64: {"e4c81cb321dd9743bcf871c5e7e8fecd7f05dea607944426e102bdda8d49e137",
					72_604_627, 170_966_532},
				arm64: {"6b70f49442461c1b1033e599ff021676ea3d20840be1e7f92e1d6560daf08637",
					68_458_634, 149_085_349},
			},
		},
		{
			name: "nvidia-cudnn-cu13", version: "9.24.1.1",
			keep: []string{
				"nvidia/cudnn/lib/libcudnn.so.9",
				"nvidia/cudnn/lib/libcudnn_graph.so.9",
				"nvidia/cudnn/lib/libcudnn_heuristic.so.9",
				"nvidia/cudnn/lib/libcudnn_engines_*.so.9",
			},
			pins: map[string]pin{
				amd64: {"06df9d1cc37d7c151f9f218a47dba0fb0223d4725115961ec02c070a081b4c1b",
					553_126_434, 966_381_167},
				arm64: {"6a7bb7c313764cd139b8fe24c9c9249506e36f5c55d3c79c79c88f6b2e391bbb",
					650_689_030, 1_068_688_633},
			},
		},
		{
			name: "nvidia-cuda-nvrtc", version: "13.4.92",
			keep: []string{
				"nvidia/cu13/lib/libnvrtc.so.13",
				"nvidia/cu13/lib/libnvrtc-builtins.so.13.4",
			},
			pins: map[string]pin{
				amd64: {"5ce8c97b00b232c4f50c8c4b5a3b68cafee08bdb82ea86f2052ff01d03194f4a",
					53_301_733, 133_653_677},
				arm64: {"24b9f5eccc6a5a19779038cf468aecb7cecfa8716269beaef5640bd989d21c28",
					50_927_348, 123_036_903},
			},
		},
		{
			name: "nvidia-cublas", version: "13.8.2.12",
			keep: []string{"nvidia/cu13/lib/libcublasLt.so.13"},
			pins: map[string]pin{
				amd64: {"21721774d8e7044debec3034ecc1a8cd22e173eb6dae5d7f5f8a014852382894",
					439_349_182, 604_526_525},
				arm64: {"8740b0e5b502b93537aea93738a0649426746fa001071365cc756c7173b5a801",
					552_775_376, 721_530_774},
			},
		},
	}
}

// cudaRun lists what a GPU host needs: the above, all of cuDNN and cuBLAS, and the libraries that
// the plugin looks up when it runs.
func cudaRun() []wheel {
	all := cudaCompile()
	for i, w := range all {
		switch w.name {
		case "nvidia-cudnn-cu13":
			all[i].keep = []string{"nvidia/cudnn/lib/libcudnn*.so.9"}
		case "nvidia-cublas":
			all[i].keep = []string{"nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libcublasLt.so.13"}
		}
	}
	return append(all, []wheel{
		{
			name: "nvidia-nccl-cu13", version: "2.30.7",
			keep: []string{"nvidia/nccl/lib/libnccl.so.2"},
			pins: map[string]pin{
				amd64: {"cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
					215_965_170, 253_342_412},
				arm64: {"ca786ffa5a647c75d4d1f5cc72a6c4f537947e2ba8823d7c8aaf768e7a7b9f77",
					215_983_881, 254_904_229},
			},
		},
		{
			name: "nvidia-cuda-runtime", version: "13.4.92",
			keep: []string{"nvidia/cu13/lib/libcudart.so.13"},
			pins: map[string]pin{
				amd64: {"9641f797da20ce1dd8e779b6e96d08cf9ba564cec8e8225458811ee26423f3a5",
					2_494_438, 7_982_484},
				arm64: {"bef071788589550ab02846fcbc732a2b88c2b16f2cd8a0f45d98e68e8c5fb0c8",
					2_509_438, 7_962_548},
			},
		},
		{
			name: "nvidia-cuda-cupti", version: "13.4.92",
			keep: []string{
				"nvidia/cu13/lib/libcupti.so.13",
				"nvidia/cu13/lib/libnvperf_*.so",
			},
			pins: map[string]pin{
				amd64: {"037b561575e6983bc4fe1caae644d7a296a8367f451bf6c2a3194f4d0765431c",
					13_058_283, 53_897_709},
				arm64: {"2358645c4607d4298dbe1d1989621ab246bc2efeb53e413be8eba922839946b1",
					12_853_334, 53_422_454},
			},
		},
		{
			name: "nvidia-cufft", version: "12.4.0.43",
			keep: []string{"nvidia/cu13/lib/libcufft.so.12"},
			pins: map[string]pin{
				amd64: {"0e8385013596b112d29c9ce8c63dc575b308d77636c7169104e18714f03961a8",
					161_750_089, 237_108_086},
				arm64: {"3938644a5b594e06d396e02d6e52bdd84589b3c1f3a8a127a2704211c2abc441",
					161_750_525, 232_654_303},
			},
		},
		{
			name: "nvidia-cusolver", version: "12.3.5.3",
			keep: []string{"nvidia/cu13/lib/libcusolver.so.12"},
			pins: map[string]pin{
				amd64: {"01f13254cfe9f99cf8d141fa4d00fbe55b235fd1509854017d766fd84442f46a",
					246_439_201, 275_102_593},
				arm64: {"42528d8347ca73e0c5c081ac1c9a51561730f50e568d3d185e3938337fd8c646",
					291_074_395, 327_536_954},
			},
		},
		{
			name: "nvidia-cusparse", version: "12.8.6.72",
			keep: []string{"nvidia/cu13/lib/libcusparse.so.12"},
			pins: map[string]pin{
				amd64: {"a739f6ff51ea2a8a2990b267b9b4d3063a5d94890efb8ccf393bfcab9dd487aa",
					170_468_146, 188_210_869},
				arm64: {"c3917c86fd419cbd42229b5cccb8bbe5200ed5b7dec3aa86d28e25c90a256e1b",
					188_672_939, 202_138_935},
			},
		},
		{
			name: "nvidia-nvjitlink", version: "13.4.92",
			keep: []string{"nvidia/cu13/lib/libnvJitLink.so.13"},
			pins: map[string]pin{
				amd64: {"e0391f24ed94ec879b84e3da4d4ec320c879aff681f2c7a638462f7199284323",
					42_452_378, 103_685_370},
				arm64: {"25f74fad0d654271c921ac4dca614bd6258bc21791242fc7b2289dad7ae9c099",
					40_420_120, 93_994_083},
			},
		},
	}...)
}
