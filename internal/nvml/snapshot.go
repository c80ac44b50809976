package nvml

// A Snapshot is everything that was asked, at one moment. Zero values mean "not known".
type Snapshot struct {
	Driver  string // of the kernel module, such as 580.95.05
	NVML    string // of the library
	CUDA    string // the newest CUDA that the driver runs, such as 13.0
	Devices []Device
	// Ancestor is the nearest common point of two devices in the PCIe tree, and NVLink says whether
	// they reach each other over NVLink, directly or through switches. Both are square.
	Ancestor [][]Level
	NVLink   [][]bool
}

// A Device is one GPU.
type Device struct {
	Name  string
	UUID  string
	PCI   string // domain:bus:device.function in sysfs's spelling, 0000:1b:00.0
	Major int    // compute capability
	Minor int

	TotalBytes    int64
	ReservedBytes int64 // kept by the driver; only newer drivers tell it apart
	FreeBytes     int64

	PCIeGen, PCIeWidth       int // as negotiated now: an idle GPU may run slower than it can
	PCIeMaxGen, PCIeMaxWidth int

	ECC         State
	Persistence State
	MIG         State
	Instances   []Instance

	PowerLimitMilliwatts int
	SMClockMHz           int // the highest the GPU allows
	MemoryClockMHz       int

	SMClockNowMHz int
	// Throttle has the reasons for which clocks are below the highest: bits of nvml.h.
	Throttle     uint64
	TemperatureC int
	// ECC errors since the driver was loaded.
	ECCCorrected, ECCUncorrected int64
	// RemapPending says that rows of memory are replaced at the next reset, RemapFailed that none are
	// left.
	RemapPending, RemapFailed bool

	CPUs []int // logical CPUs near the GPU
	NUMA int   // memory node near the GPU; -1 when not known

	Links  []Link
	Fabric Fabric

	Faults []*Error // answers that are neither success nor "not supported"
}

// A State is a switch that may be unknown.
type State int8

// The states. The zero value is Unknown.
const (
	Unknown State = iota
	Off
	On
)

// An Instance is one MIG partition of a GPU.
type Instance struct {
	Name            string // as the driver gives it: NVIDIA H100 80GB HBM3 MIG 1g.10gb
	UUID            string
	MemoryBytes     int64
	GPUSlices       int
	ComputeSlices   int
	Multiprocessors int
}

// A Link is one active or inactive NVLink of a device.
type Link struct {
	Active  bool
	Version int    // NVLink generation: 3, 4, 5
	MBps    int    // signalling rate in one direction, in 10^6 bytes a second
	Remote  Remote // what is on the other side
	PCI     string // and its address, where the driver tells it
}

// A Remote is the kind of thing that a link leads to.
type Remote int8

// The kinds. The zero value is RemoteUnknown.
const (
	RemoteUnknown Remote = iota
	RemoteGPU
	RemoteCPU
	RemoteSwitch
)

// A Fabric is a device's place in a rack whose hosts share NVLink switches (NVL72).
type Fabric struct {
	Ready   bool   // registered with the fabric manager
	Cluster string // UUID of the rack's fabric; all zero on a single host
	Clique  int    // devices of one cluster and clique reach each other
	Status  int    // nvmlReturn_t of the registration
}

// A Level is the nearest point that two devices share in the PCIe tree, as nvml.h numbers it;
// LevelUnknown where the driver does not tell.
type Level int

// LevelUnknown is the level of a pair that the driver says nothing about.
const LevelUnknown Level = -1

// levels are the names that `nvidia-smi topo -m` prints, which is how engineers know them.
var levels = map[Level]string{
	0: "board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS",
}

// String gives the name that nvidia-smi prints, from PIX (one switch between them) to SYS (across
// the processors' own link), or "" where the level is not known.
func (l Level) String() string { return levels[l] }
