package nvml

import (
	"bytes"
	"reflect"

	"github.com/ebitengine/purego"
)

// Sizes of text buffers that nvml.h promises are large enough.
const (
	nameSize    = 96 // NVML_DEVICE_NAME_V2_BUFFER_SIZE
	uuidSize    = 96 // NVML_DEVICE_UUID_V2_BUFFER_SIZE
	versionSize = 80 // NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE, and the same for NVML's own
)

// Arguments of nvml.h's enumerations that are passed to the driver.
const (
	clockSM        = 1 // NVML_CLOCK_SM
	clockMemory    = 2 // NVML_CLOCK_MEM
	eccCorrected   = 0 // NVML_MEMORY_ERROR_TYPE_CORRECTED
	eccUncorrected = 1 // NVML_MEMORY_ERROR_TYPE_UNCORRECTED
	sinceBoot      = 0 // NVML_VOLATILE_ECC
	sensorGPU      = 0 // NVML_TEMPERATURE_GPU
	eventXid       = 8 // nvmlEventTypeXidCriticalError
	scopeNode      = 0 // NVML_AFFINITY_SCOPE_NODE
	p2pNVLink      = 2 // NVML_P2P_CAPS_INDEX_NVLINK
	fieldLinkCount = 91
	fieldLinkSpeed = 164 // NVML_FI_DEV_NVLINK_GET_SPEED, MB/s of the link named by the scope
	fieldAllSpeed  = 90  // NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, for drivers without field 164
	maxLinks       = 36  // NVML_NVLINK_MAX_LINKS of NVLink 6; no GPU has more
)

// A handle is an nvmlDevice_t.
type handle uintptr

// pciInfo is nvmlPciInfo_t.
type pciInfo struct {
	busLegacy                                [16]byte
	domain, bus, device, deviceID, subsystem uint32
	busID                                    [32]byte
}

// memory1 is nvmlMemory_t, memory2 the versioned nvmlMemory_v2_t, which tells apart what the
// driver keeps for itself.
type memory1 struct{ total, free, used uint64 }

type memory2 struct {
	version                     uint32
	_                           uint32
	total, reserved, free, used uint64
}

// attributes is nvmlDeviceAttributes_t: the share of a GPU that a MIG instance owns.
type attributes struct {
	multiprocessors, copyEngines, decoders, encoders, jpeg, ofa uint32
	gpuSlices, computeSlices                                    uint32
	memoryMiB                                                   uint64
}

// fieldValue is nvmlFieldValue_t with its union read as an integer.
type fieldValue struct {
	field, scope       uint32
	timestamp, latency int64
	kind               uint32
	result             int32
	value              uint64
}

// Values of fieldValue.kind that hold an integer in the low bytes of the union.
const (
	kindUint  = 1 // NVML_VALUE_TYPE_UNSIGNED_INT
	kindUlong = 2 // NVML_VALUE_TYPE_UNSIGNED_LONG
	kindUll   = 3 // NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
)

// fabricInfo is nvmlGpuFabricInfo_v2_t.
type fabricInfo struct {
	version uint32
	cluster [16]byte
	status  int32
	clique  uint32
	state   uint8
	_       [3]byte
	health  uint32
}

// eventData is nvmlEventData_t.
type eventData struct {
	device               handle
	kind, data           uint64
	gpuInstance, compute uint32
}

// versioned gives the version word of a struct of the given size: NVML packs both into 32 bits.
func versioned(size uintptr, version uint32) uint32 { return uint32(size) | version<<24 }

// calls are the functions of the library, each bound to the symbol in its tag with "nvml" before
// it, or, where the driver has none, a function that answers codeNoFunction. An int32
// result is an nvmlReturn_t.
type calls struct {
	Init          func() int32                                `nvml:"Init_v2"`
	Shutdown      func() int32                                `nvml:"Shutdown"`
	ErrorString   func(int32) string                          `nvml:"ErrorString"`
	DriverVersion func(*byte, uint32) int32                   `nvml:"SystemGetDriverVersion"`
	NVMLVersion   func(*byte, uint32) int32                   `nvml:"SystemGetNVMLVersion"`
	CUDAVersion   func(*int32) int32                          `nvml:"SystemGetCudaDriverVersion_v2"`
	Count         func(*uint32) int32                         `nvml:"DeviceGetCount_v2"`
	ByIndex       func(uint32, *handle) int32                 `nvml:"DeviceGetHandleByIndex_v2"`
	Name          func(handle, *byte, uint32) int32           `nvml:"DeviceGetName"`
	UUID          func(handle, *byte, uint32) int32           `nvml:"DeviceGetUUID"`
	PCI           func(handle, *pciInfo) int32                `nvml:"DeviceGetPciInfo_v3"`
	Memory1       func(handle, *memory1) int32                `nvml:"DeviceGetMemoryInfo"`
	Memory2       func(handle, *memory2) int32                `nvml:"DeviceGetMemoryInfo_v2"`
	Capability    func(handle, *int32, *int32) int32          `nvml:"DeviceGetCudaComputeCapability"`
	PCIeGen       func(handle, *uint32) int32                 `nvml:"DeviceGetCurrPcieLinkGeneration"`
	PCIeWidth     func(handle, *uint32) int32                 `nvml:"DeviceGetCurrPcieLinkWidth"`
	PCIeMaxGen    func(handle, *uint32) int32                 `nvml:"DeviceGetMaxPcieLinkGeneration"`
	PCIeMaxWidth  func(handle, *uint32) int32                 `nvml:"DeviceGetMaxPcieLinkWidth"`
	ECC           func(handle, *uint32, *uint32) int32        `nvml:"DeviceGetEccMode"`
	Persistence   func(handle, *uint32) int32                 `nvml:"DeviceGetPersistenceMode"`
	PowerLimit    func(handle, *uint32) int32                 `nvml:"DeviceGetEnforcedPowerLimit"`
	MaxClock      func(handle, uint32, *uint32) int32         `nvml:"DeviceGetMaxClockInfo"`
	CPUAffinity   func(handle, uint32, *uint64) int32         `nvml:"DeviceGetCpuAffinity"`
	NodeAffinity  func(handle, uint32, *uint64, uint32) int32 `nvml:"DeviceGetMemoryAffinity"`
	MIGMode       func(handle, *uint32, *uint32) int32        `nvml:"DeviceGetMigMode"`
	MIGMax        func(handle, *uint32) int32                 `nvml:"DeviceGetMaxMigDeviceCount"`
	MIGByIndex    func(handle, uint32, *handle) int32         `nvml:"DeviceGetMigDeviceHandleByIndex"`
	Attributes    func(handle, *attributes) int32             `nvml:"DeviceGetAttributes_v2"`
	LinkState     func(handle, uint32, *uint32) int32         `nvml:"DeviceGetNvLinkState"`
	LinkVersion   func(handle, uint32, *uint32) int32         `nvml:"DeviceGetNvLinkVersion"`
	LinkRemote    func(handle, uint32, *pciInfo) int32        `nvml:"DeviceGetNvLinkRemotePciInfo_v2"`
	LinkKind      func(handle, uint32, *int32) int32          `nvml:"DeviceGetNvLinkRemoteDeviceType"`
	Fields        func(handle, int32, *fieldValue) int32      `nvml:"DeviceGetFieldValues"`
	Ancestor      func(handle, handle, *int32) int32          `nvml:"DeviceGetTopologyCommonAncestor"`
	P2P           func(handle, handle, uint32, *int32) int32  `nvml:"DeviceGetP2PStatus"`
	Fabric        func(handle, *fabricInfo) int32             `nvml:"DeviceGetGpuFabricInfoV"`

	Clock       func(handle, uint32, *uint32) int32         `nvml:"DeviceGetClockInfo"`
	ECCErrors   func(handle, uint32, uint32, *uint64) int32 `nvml:"DeviceGetTotalEccErrors"`
	Temperature func(handle, uint32, *uint32) int32         `nvml:"DeviceGetTemperature"`

	Throttle func(handle, *uint64) int32 `nvml:"DeviceGetCurrentClocksThrottleReasons"`

	Remapped func(handle, *uint32, *uint32, *uint32, *uint32) int32 `nvml:"DeviceGetRemappedRows"`

	EventSet      func(*uintptr) int32                    `nvml:"EventSetCreate"`
	RegisterEvent func(handle, uint64, uintptr) int32     `nvml:"DeviceRegisterEvents"`
	WaitEvent     func(uintptr, *eventData, uint32) int32 `nvml:"EventSetWait_v2"`
	FreeEvents    func(uintptr) int32                     `nvml:"EventSetFree"`
}

// bind fills every function. One whose symbol the library lacks answers codeNoFunction.
func (c *calls) bind(library uintptr) (missing []string) {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		symbol := "nvml" + v.Type().Field(i).Tag.Get("nvml")
		if address, err := purego.Dlsym(library, symbol); err == nil && address != 0 {
			purego.RegisterFunc(v.Field(i).Addr().Interface(), address)
			continue
		}
		missing = append(missing, symbol)
		v.Field(i).Set(reflect.MakeFunc(v.Field(i).Type(), func([]reflect.Value) []reflect.Value {
			answer := reflect.New(v.Field(i).Type().Out(0)).Elem()
			if answer.CanInt() {
				answer.SetInt(codeNoFunction)
			}
			return []reflect.Value{answer}
		}))
	}
	return missing
}

// text is the C string at the start of a buffer.
func text(buffer []byte) string {
	before, _, _ := bytes.Cut(buffer, []byte{0})
	return string(before)
}
