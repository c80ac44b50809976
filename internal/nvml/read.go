package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// soname is what the loader looks for, so that LD_LIBRARY_PATH and the container toolkit's mounts
// work as they do for every other program.
const soname = "libnvidia-ml.so.1"

// Read loads NVML from path, or by its soname where path is empty, and takes a snapshot. It
// answers [ErrNoLibrary] when there is nothing to load and an [*Error] when NVML refuses to start.
func Read(path string) (*Snapshot, error) {
	library, err := purego.Dlopen(cmp.Or(path, soname), purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	defer func() { _ = purego.Dlclose(library) }()
	r := &reader{}
	missing := r.bind(library)
	needed := []string{"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}
	if slices.ContainsFunc(needed, func(s string) bool { return slices.Contains(missing, s) }) {
		return nil, fmt.Errorf("%w: it lacks nvmlInit_v2 or the list of devices", ErrNoLibrary)
	}
	if code := r.Init(); code != 0 {
		return nil, r.failure("nvmlInit_v2", code)
	}
	defer r.Shutdown()
	return r.snapshot()
}

// A reader asks the questions. Its methods fill in what the driver answers and leave the rest.
type reader struct {
	calls
	handles []handle
}

func (r *reader) failure(call string, code int32) *Error {
	return &Error{Call: call, Code: int(code), Text: cmp.Or(r.ErrorString(code), "unknown error")}
}

func (r *reader) snapshot() (*Snapshot, error) {
	s := &Snapshot{
		Driver: r.system(r.DriverVersion),
		NVML:   r.system(r.NVMLVersion),
	}
	var v int32
	if r.CUDAVersion(&v) == 0 {
		s.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	var n uint32
	if code := r.Count(&n); code != 0 {
		return nil, r.failure("nvmlDeviceGetCount_v2", code)
	}
	for i := range n {
		var h handle
		d := Device{NUMA: -1}
		if code := r.ByIndex(i, &h); code != 0 {
			// The GPU is there but cannot be opened; its place in the numbering must stay.
			h = 0
			d.Faults = append(d.Faults, r.failure("nvmlDeviceGetHandleByIndex_v2", code))
		} else {
			r.device(h, &d)
		}
		r.handles = append(r.handles, h)
		s.Devices = append(s.Devices, d)
	}
	r.pairs(s)
	return s, nil
}

func (r *reader) system(ask func(*byte, uint32) int32) string {
	var buffer [versionSize]byte
	if ask(&buffer[0], versionSize) != 0 {
		return ""
	}
	return text(buffer[:])
}

// ok reports success and files away any answer that means trouble.
func (r *reader) ok(d *Device, call string, code int32) bool {
	same := func(e *Error) bool { return e.Code == int(code) }
	// A lost GPU gives the same answer to every question; once is enough.
	if code != 0 && !unknown(int(code)) && !slices.ContainsFunc(d.Faults, same) {
		d.Faults = append(d.Faults, r.failure(call, code))
	}
	return code == 0
}

func (r *reader) device(h handle, d *Device) {
	d.Name = r.label(r.Name, h, nameSize)
	d.UUID = r.label(r.UUID, h, uuidSize)
	var p pciInfo
	if r.ok(d, "nvmlDeviceGetPciInfo_v3", r.PCI(h, &p)) {
		d.PCI = p.address()
	}
	var major, minor int32
	if r.ok(d, "nvmlDeviceGetCudaComputeCapability", r.Capability(h, &major, &minor)) {
		d.Major, d.Minor = int(major), int(minor)
	}
	r.memory(h, d)
	for _, q := range []struct {
		ask  func(handle, *uint32) int32
		name string
		to   *int
	}{
		{r.PCIeGen, "nvmlDeviceGetCurrPcieLinkGeneration", &d.PCIeGen},
		{r.PCIeWidth, "nvmlDeviceGetCurrPcieLinkWidth", &d.PCIeWidth},
		{r.PCIeMaxGen, "nvmlDeviceGetMaxPcieLinkGeneration", &d.PCIeMaxGen},
		{r.PCIeMaxWidth, "nvmlDeviceGetMaxPcieLinkWidth", &d.PCIeMaxWidth},
		{r.PowerLimit, "nvmlDeviceGetEnforcedPowerLimit", &d.PowerLimitMilliwatts},
		{r.clock(clockSM), "nvmlDeviceGetMaxClockInfo", &d.SMClockMHz},
		{r.clock(clockMemory), "nvmlDeviceGetMaxClockInfo", &d.MemoryClockMHz},
	} {
		var v uint32
		if r.ok(d, q.name, q.ask(h, &v)) {
			*q.to = int(v)
		}
	}
	r.modes(h, d)
	r.health(h, d)
	r.affinity(h, d)
	r.instances(h, d)
	r.links(h, d)
	r.fabric(h, d)
}

func (r *reader) label(ask func(handle, *byte, uint32) int32, h handle, size uint32) string {
	buffer := make([]byte, size)
	if ask(h, &buffer[0], size) != 0 {
		return ""
	}
	return text(buffer)
}

func (r *reader) clock(kind uint32) func(handle, *uint32) int32 {
	return func(h handle, v *uint32) int32 { return r.MaxClock(h, kind, v) }
}

// memory prefers the second version, which does not count the driver's own part as used.
func (r *reader) memory(h handle, d *Device) {
	m := memory2{version: versioned(unsafe.Sizeof(memory2{}), 2)}
	if r.ok(d, "nvmlDeviceGetMemoryInfo_v2", r.Memory2(h, &m)) {
		d.TotalBytes, d.ReservedBytes, d.FreeBytes = int64(m.total), int64(m.reserved), int64(m.free)
		return
	}
	var old memory1
	if r.ok(d, "nvmlDeviceGetMemoryInfo", r.Memory1(h, &old)) {
		d.TotalBytes, d.FreeBytes = int64(old.total), int64(old.free)
	}
}

func (r *reader) modes(h handle, d *Device) {
	var now, pending uint32
	if r.ok(d, "nvmlDeviceGetEccMode", r.ECC(h, &now, &pending)) {
		d.ECC = state(now)
	}
	if r.ok(d, "nvmlDeviceGetMigMode", r.MIGMode(h, &now, &pending)) {
		d.MIG = state(now)
	}
	if r.ok(d, "nvmlDeviceGetPersistenceMode", r.Persistence(h, &now)) {
		d.Persistence = state(now)
	}
}

// health reads what changes while a GPU works.
func (r *reader) health(h handle, d *Device) {
	var v uint32
	if r.ok(d, "nvmlDeviceGetClockInfo", r.Clock(h, clockSM, &v)) {
		d.SMClockNowMHz = int(v)
	}
	if r.ok(d, "nvmlDeviceGetTemperature", r.Temperature(h, sensorGPU, &v)) {
		d.TemperatureC = int(v)
	}
	var reasons uint64
	if r.ok(d, "nvmlDeviceGetCurrentClocksThrottleReasons", r.Throttle(h, &reasons)) {
		d.Throttle = reasons
	}
	for kind, to := range []*int64{eccCorrected: &d.ECCCorrected, eccUncorrected: &d.ECCUncorrected} {
		var n uint64
		if r.ok(d, "nvmlDeviceGetTotalEccErrors", r.ECCErrors(h, uint32(kind), sinceBoot, &n)) {
			*to = int64(min(n, 1<<62))
		}
	}
	var corrected, uncorrected, pending, failed uint32
	if r.ok(d, "nvmlDeviceGetRemappedRows", r.Remapped(h, &corrected, &uncorrected, &pending,
		&failed)) {
		d.RemapPending, d.RemapFailed = pending != 0, failed != 0
	}
}

func state(v uint32) State {
	if v == 0 {
		return Off
	}
	return On
}

// affinity reads bit sets: 16 words hold 1,024 CPUs, more than any host of today has.
func (r *reader) affinity(h handle, d *Device) {
	var set [16]uint64
	if r.ok(d, "nvmlDeviceGetCpuAffinity", r.CPUAffinity(h, uint32(len(set)), &set[0])) {
		d.CPUs = members(set[:])
	}
	set = [16]uint64{}
	if r.ok(d, "nvmlDeviceGetMemoryAffinity",
		r.NodeAffinity(h, uint32(len(set)), &set[0], scopeNode)) {
		if nodes := members(set[:]); len(nodes) > 0 {
			d.NUMA = nodes[0]
		}
	}
}

func members(set []uint64) []int {
	var list []int
	for i, word := range set {
		for b := range 64 {
			if word&(1<<b) != 0 {
				list = append(list, i*64+b)
			}
		}
	}
	return list
}

func (r *reader) instances(h handle, d *Device) {
	if d.MIG != On {
		return
	}
	var n uint32
	if !r.ok(d, "nvmlDeviceGetMaxMigDeviceCount", r.MIGMax(h, &n)) {
		return
	}
	for i := range n {
		var part handle
		// Places that hold no instance answer "not found"; the used ones need not be the first.
		if !r.ok(d, "nvmlDeviceGetMigDeviceHandleByIndex", r.MIGByIndex(h, i, &part)) {
			continue
		}
		in := Instance{
			Name: r.label(r.Name, part, nameSize),
			UUID: r.label(r.UUID, part, uuidSize),
		}
		var a attributes
		if r.ok(d, "nvmlDeviceGetAttributes_v2", r.Attributes(part, &a)) {
			in.MemoryBytes = int64(a.memoryMiB) << 20
			in.GPUSlices, in.ComputeSlices = int(a.gpuSlices), int(a.computeSlices)
			in.Multiprocessors = int(a.multiprocessors)
		}
		d.Instances = append(d.Instances, in)
	}
}

func (r *reader) links(h handle, d *Device) {
	count := uint32(maxLinks)
	if v, ok := r.field(h, fieldLinkCount, 0); ok {
		count = min(count, uint32(v))
	}
	for i := range count {
		var active uint32
		code := r.LinkState(h, i, &active)
		if code == codeInvalid || code == codeNotSupported || code == codeNoFunction {
			return // past the last link, or a GPU without NVLink
		}
		if r.ok(d, "nvmlDeviceGetNvLinkState", code) {
			d.Links = append(d.Links, r.link(h, i, active != 0))
		}
	}
}

// generations maps nvmlNvlinkVersion_t, which numbers releases in order, to the generation.
var generations = [...]int{0, 1, 2, 2, 3, 3, 4, 5, 6}

func (r *reader) link(h handle, i uint32, active bool) Link {
	l := Link{Active: active}
	if !active {
		return l
	}
	var version uint32
	if r.LinkVersion(h, i, &version) == 0 && int(version) < len(generations) {
		l.Version = generations[version]
	}
	if v, ok := r.field(h, fieldLinkSpeed, i); ok {
		l.MBps = int(v)
	} else if v, ok := r.field(h, fieldAllSpeed, 0); ok {
		l.MBps = int(v)
	}
	var kind int32
	if r.LinkKind(h, i, &kind) == 0 {
		switch kind { // nvmlIntNvLinkDeviceType_t
		case 0:
			l.Remote = RemoteGPU
		case 1:
			l.Remote = RemoteCPU
		case 2:
			l.Remote = RemoteSwitch
		}
	}
	var p pciInfo
	if r.LinkRemote(h, i, &p) == 0 {
		l.PCI = p.address()
	}
	return l
}

func (r *reader) field(h handle, id, scope uint32) (uint64, bool) {
	f := fieldValue{field: id, scope: scope}
	if r.Fields(h, 1, &f) != 0 || f.result != 0 {
		return 0, false
	}
	switch f.kind {
	case kindUint:
		return f.value & 0xffffffff, true
	case kindUlong, kindUll:
		return f.value, true
	}
	return 0, false
}

func (r *reader) fabric(h handle, d *Device) {
	f := fabricInfo{version: versioned(unsafe.Sizeof(fabricInfo{}), 2)}
	if !r.ok(d, "nvmlDeviceGetGpuFabricInfoV", r.Fabric(h, &f)) || f.state == 0 {
		return // state 0: the GPU has no fabric to register with
	}
	c := f.cluster
	d.Fabric = Fabric{
		Ready:   f.state == 3 && f.status == 0, // NVML_GPU_FABRIC_STATE_COMPLETED
		Cluster: fmt.Sprintf("%x-%x-%x-%x-%x", c[:4], c[4:6], c[6:8], c[8:10], c[10:]),
		Clique:  int(f.clique),
		Status:  int(f.status),
	}
}

// pairs asks about every pair once; both answers are symmetric.
func (r *reader) pairs(s *Snapshot) {
	n := len(r.handles)
	s.Ancestor, s.NVLink = make([][]Level, n), make([][]bool, n)
	for i := range n {
		s.Ancestor[i], s.NVLink[i] = make([]Level, n), make([]bool, n)
	}
	for i, a := range r.handles {
		for j, b := range r.handles[:i] {
			level, linked := r.pair(a, b)
			s.Ancestor[i][j], s.Ancestor[j][i] = level, level
			s.NVLink[i][j], s.NVLink[j][i] = linked, linked
		}
	}
}

func (r *reader) pair(a, b handle) (level Level, linked bool) {
	level = LevelUnknown
	if a == 0 || b == 0 {
		return level, false // one of them could not be opened
	}
	var v int32
	if r.Ancestor(a, b, &v) == 0 {
		level = Level(v)
	}
	linked = r.P2P(a, b, p2pNVLink, &v) == 0 && v == 0 // NVML_P2P_STATUS_OK
	return level, linked
}

// address spells the place as sysfs does: NVML writes a domain of eight digits in capitals, Linux
// one of four in small letters. An all-ones or all-zero answer means that the driver hides it.
func (p *pciInfo) address() string {
	id := strings.ToLower(cmp.Or(text(p.busID[:]), text(p.busLegacy[:])))
	if domain, rest, ok := strings.Cut(id, ":"); ok && len(domain) == 8 && domain[:4] == "0000" {
		id = domain[4:] + ":" + rest
	}
	if strings.Trim(id, "0:.") == "" || strings.Trim(id, "f:.0") == "" {
		return ""
	}
	return id
}
