package nvml

import (
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

// stub compiles the stand-in library once for each set of flags and gives its path.
func stub(t *testing.T, flags ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler (cc) to build the stand-in for NVML with")
	}
	library := filepath.Join(t.TempDir(), soname)
	args := append(flags, "-shared", "-fPIC", "-O1", "-o", library,
		filepath.Join("testdata", "nvmlstub.c"))
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return library
}

func TestLayoutsAreThoseOfTheHeader(t *testing.T) {
	// The sizes that nvml.h's own version words encode: nvmlMemory_v2 is 0x02000028 and
	// nvmlGpuFabricInfo_v2 is 0x02000024.
	if got := versioned(unsafe.Sizeof(memory2{}), 2); got != 0x02000028 {
		t.Errorf("memory2 has version word %#x", got)
	}
	if got := versioned(unsafe.Sizeof(fabricInfo{}), 2); got != 0x02000024 {
		t.Errorf("fabricInfo has version word %#x", got)
	}
	for name, pair := range map[string][2]uintptr{
		"pciInfo":    {unsafe.Sizeof(pciInfo{}), 68},
		"memory1":    {unsafe.Sizeof(memory1{}), 24},
		"attributes": {unsafe.Sizeof(attributes{}), 40},
		"fieldValue": {unsafe.Sizeof(fieldValue{}), 40},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s has %d bytes, want %d", name, pair[0], pair[1])
		}
	}
}

func TestReadEightB200(t *testing.T) {
	s := read(t, stub(t), "b200")
	if s.Driver != "580.95.05" || s.NVML != "13.580.95.05" || s.CUDA != "13.0" {
		t.Errorf("system: %q %q %q", s.Driver, s.NVML, s.CUDA)
	}
	if len(s.Devices) != 8 {
		t.Fatalf("%d devices", len(s.Devices))
	}
	d := s.Devices[4]
	want := Device{
		Name: "NVIDIA B200", UUID: "GPU-00000000-0000-4000-8000-000000000040",
		PCI: "0000:9d:00.0", Major: 10, Minor: 0,
		TotalBytes: 183359 << 20, ReservedBytes: 716 << 20, FreeBytes: 182643 << 20,
		PCIeGen: 5, PCIeWidth: 16, PCIeMaxGen: 5, PCIeMaxWidth: 16,
		ECC: On, Persistence: On, MIG: Off, PowerLimitMilliwatts: 1000000,
		SMClockMHz: 1965, MemoryClockMHz: 3996, NUMA: 1,
		Fabric: Fabric{Ready: true, Cluster: "00000000-0000-0000-0000-000000000000"},
	}
	if len(d.CPUs) != 112 || d.CPUs[0] != 56 || d.CPUs[111] != 223 {
		t.Errorf("CPUs: %v", d.CPUs)
	}
	link := Link{Active: true, Version: 5, MBps: 53125, Remote: RemoteSwitch}
	if len(d.Links) != 18 || slices.ContainsFunc(d.Links, func(l Link) bool { return l != link }) {
		t.Errorf("links: %+v", d.Links)
	}
	d.CPUs, d.Links = nil, nil
	if diff := cmp.Diff(want, d); diff != "" {
		t.Errorf("device (-want +got):\n%s", diff)
	}
	for i := range 8 {
		for j := range 8 {
			if s.NVLink[i][j] != (i != j) {
				t.Errorf("pair %d %d: NVLink %v", i, j, s.NVLink[i][j])
			}
		}
	}
	if s.Ancestor[0][3].String() != "NODE" || s.Ancestor[7][0].String() != "SYS" {
		t.Errorf("ancestors: %v %v", s.Ancestor[0][3], s.Ancestor[7][0])
	}
}

func TestReadMIG(t *testing.T) {
	d := read(t, stub(t), "mig").Devices[0]
	if d.MIG != On || len(d.Instances) != 3 {
		t.Fatalf("MIG %v, %d instances", d.MIG, len(d.Instances))
	}
	want := Instance{
		Name: "NVIDIA H100 80GB HBM3 MIG 2g.20gb", UUID: "MIG-00000000-0000-4000-8000-000000000002",
		MemoryBytes: 20096 << 20, GPUSlices: 2, ComputeSlices: 2, Multiprocessors: 32,
	}
	if d.Instances[1] != want {
		t.Errorf("got %+v", d.Instances[1])
	}
	if d.Links[0].Active {
		t.Error("a GPU partitioned by MIG has an active NVLink")
	}
}

func TestReadOtherMachines(t *testing.T) {
	library := stub(t)
	t.Run("rtx", func(t *testing.T) {
		d := read(t, library, "rtx").Devices[1]
		if d.Major != 12 || len(d.Links) != 0 || d.MIG != Unknown || d.Fabric != (Fabric{}) {
			t.Errorf("got %+v", d)
		}
	})
	t.Run("gb200", func(t *testing.T) {
		f := read(t, library, "gb200").Devices[0].Fabric
		if !f.Ready || f.Clique != 3 || f.Cluster != "abababab-abab-abab-abab-abababababab" {
			t.Errorf("got %+v", f)
		}
	})
	t.Run("lost", func(t *testing.T) {
		s := read(t, library, "lost")
		if len(s.Devices) != 8 || len(s.Devices[5].Faults) != 1 || s.Devices[5].Faults[0].Code != 15 {
			t.Errorf("device 5: %+v", s.Devices[5])
		}
		if s.Devices[6].Name == "" || s.Ancestor[5][0] != LevelUnknown || s.NVLink[5][0] {
			t.Error("the lost GPU spoils its neighbours, or has links of its own")
		}
	})
	t.Run("uneven", func(t *testing.T) {
		s := read(t, library, "uneven")
		if s.Devices[2].Links[0].Active || s.NVLink[2][3] || !s.NVLink[0][1] {
			t.Error("GPU 2's links are not down, or others' are")
		}
	})
}

// TestReadOldDriver holds that a function the driver lacks leaves its field unknown.
func TestReadOldDriver(t *testing.T) {
	s := read(t, stub(t, "-DNVMLSTUB_BARE"), "b200")
	d := s.Devices[0]
	if d.TotalBytes != 183359<<20 || d.FreeBytes == 0 || d.ReservedBytes != 0 {
		t.Errorf("memory of the first version: %d %d %d", d.TotalBytes, d.FreeBytes, d.ReservedBytes)
	}
	if d.MIG != Unknown || d.NUMA != -1 || d.Fabric != (Fabric{}) || len(d.Faults) != 0 {
		t.Errorf("got %+v", d)
	}
	want := Link{Active: true, Version: 5}
	if len(d.Links) != 18 || d.Links[17] != want {
		t.Errorf("links: %+v", d.Links)
	}
	if s.NVLink[0][1] {
		t.Error("a pair is linked although nobody said so")
	}
}

func TestReadFails(t *testing.T) {
	library := stub(t)
	for machine, code := range map[string]int{"notloaded": CodeNotLoaded, "mismatch": CodeMismatch} {
		t.Setenv("NVMLSTUB", machine)
		_, err := Read(library)
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Code != code || e.Call != "nvmlInit_v2" {
			t.Errorf("%s: %v", machine, err)
		}
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none.so")); !errors.Is(err, ErrNoLibrary) {
		t.Errorf("no library: %v", err)
	}
}

func TestErrorSaysCallCodeAndText(t *testing.T) {
	t.Setenv("NVMLSTUB", "notloaded")
	_, err := Read(stub(t))
	if want := "nvmlInit_v2: Driver Not Loaded (NVML code 9)"; err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"00000000:1B:00.0": "0000:1b:00.0",
		"00010000:1B:00.0": "00010000:1b:00.0", // a domain beyond 16 bits stays as it is
		"0008:01:00.0":     "0008:01:00.0",
		"00000000:00:00.0": "",
		"FFFFFFFF:FF:FF.0": "",
		"":                 "",
	} {
		var p pciInfo
		copy(p.busID[:], in)
		if got := p.address(); got != want {
			t.Errorf("%q gave %q, want %q", in, got, want)
		}
	}
}

func read(t *testing.T, library, machine string) *Snapshot {
	t.Helper()
	t.Setenv("NVMLSTUB", machine)
	s, err := Read(library)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
