package pjrt

import (
	"strings"
	"unsafe"

	"github.com/deepwell/deepwell/dtype"
)

// The range of PJRT versions that the layouts below were checked against: 0.81 is the CPU
// plugin's own header, 0.114 the newest header published, 0.116 what the CUDA plugin reports.
const (
	versionMajor    = 0
	versionMinorMin = 81
	versionMinorMax = 116
)

// apiHeader is the beginning of PJRT_Api; the function pointers follow it.
type apiHeader struct {
	size      uintptr
	extension unsafe.Pointer
	version   struct {
		size         uintptr
		extension    unsafe.Pointer
		major, minor int32
	}
}

// A slot is the place of a function in PJRT_Api, counted from the first function pointer. The
// table only ever grows at its end, so a slot is the same in every version.
type slot int

const (
	errorDestroy          slot = 0
	errorMessage          slot = 1
	errorGetCode          slot = 2
	pluginInitialize      slot = 3
	eventDestroy          slot = 5
	eventIsReady          slot = 6
	eventAwait            slot = 8
	eventOnReady          slot = 9
	clientCreate          slot = 10
	clientDestroy         slot = 11
	clientPlatformName    slot = 12
	clientPlatformVersion slot = 14
	clientDevices         slot = 15
	clientAddressable     slot = 16
	clientCompile         slot = 20
	clientBufferFromHost  slot = 22
	descriptionID         slot = 23
	descriptionProcess    slot = 24
	descriptionAttributes slot = 25
	descriptionKind       slot = 26
	deviceDescription     slot = 29
	deviceLocalID         slot = 31
	deviceMemories        slot = 32
	deviceDefaultMemory   slot = 33
	deviceMemoryStats     slot = 34
	memoryKind            slot = 36
	executableDestroy     slot = 40
	executableOutputs     slot = 44
	executableOptimized   slot = 48
	executableSerialize   slot = 49
	loadedDestroy         slot = 50
	loadedExecutable      slot = 51
	loadedDevices         slot = 52
	loadedExecute         slot = 55
	deserializeAndLoad    slot = 56
	bufferDestroy         slot = 58
	bufferIsDeleted       slot = 68
	bufferCopyToDevice    slot = 69
	bufferToHost          slot = 70
	bufferReadyEvent      slot = 72
	bufferUnsafePointer   slot = 73
	topologyCreate        slot = 82
	topologyDestroy       slot = 83
	compileTopology       slot = 89
	executableOutputTypes slot = 90
	executableOutputDims  slot = 91
	bufferCopyToMemory    slot = 92
	clientCreateView      slot = 93
	executableMemoryStats slot = 96
	bufferRawToHost       slot = 100
	transferDestroy       slot = 101
	transferData          slot = 102
	clientCreateTransfer  slot = 103
	transferRetrieve      slot = 104
	clientUpdateProcesses slot = 113
)

// slotNames gives the C name of the functions that not every supported version has, for the
// error that says so.
var slotNames = map[slot]string{
	clientUpdateProcesses: "PJRT_Client_UpdateGlobalProcessInfo",
}

// head begins every argument structure. The tail of zeros that some structures end with leaves
// room for fields that a version newer than our header may have appended.
type head struct {
	size      uintptr
	extension unsafe.Pointer
}

// one is the argument of every call that takes one object and returns nothing.
type one struct {
	head
	object unsafe.Pointer
}

// A span is an array that C takes or gives, a pointer and a length.
type span struct {
	data unsafe.Pointer
	len  uintptr
}

// spanOf is Go memory as C sees it; whoever passes it on keeps it alive.
func spanOf[T any](s []T) span { return span{slicePointer(s), uintptr(len(s))} }

func textSpan(s string) span { return span{stringPointer(s), uintptr(len(s))} }

// String copies a string out of C memory.
func (s span) String() string { return strings.Clone(unsafe.String((*byte)(s.data), int(s.len))) }

// list is the argument of every call that takes an object and returns an array or a string.
type list struct {
	head
	object unsafe.Pointer
	span
}

// number is the argument of every call that takes an object and returns a small integer, a flag
// or an enumeration: C stores 1, 4 or 8 bytes into a word that begins as zero.
type number struct {
	head
	object unsafe.Pointer
	value  int64
}

// related is the argument of every call that takes an object and returns another.
type related struct {
	head
	object unsafe.Pointer
	result unsafe.Pointer
}

// counted is a list whose length comes before its items.
type counted struct {
	head
	object unsafe.Pointer
	len    uintptr
	items  unsafe.Pointer
}

// copied is the argument of a copy: from an object, to a place, giving a new object.
type copied struct {
	head
	object unsafe.Pointer
	target unsafe.Pointer
	result unsafe.Pointer
}

// serialized is the argument of calls that hand out bytes together with what frees them.
type serialized struct {
	head
	object unsafe.Pointer
	span
	backing unsafe.Pointer
	deleter uintptr
}

// namedValue is PJRT_NamedValue: an option or an attribute.
type namedValue struct {
	head
	name  span
	kind  int32
	value uintptr // a string, a list, an int64, a float or a bool, all in eight bytes
	len   uintptr
}

const (
	namedString int32 = iota
	namedInt64
	namedInt64List
	namedFloat
	namedBool
)

type clientCreateArgs struct {
	head
	options  span
	kvGet    uintptr
	kvGetArg uintptr
	kvPut    uintptr
	kvPutArg uintptr
	client   unsafe.Pointer
	kvTryGet uintptr
	kvTryArg uintptr
}

type programArgs struct {
	head
	code, format span
}

type clientCompileArgs struct {
	head
	client     unsafe.Pointer
	program    unsafe.Pointer
	options    span
	executable unsafe.Pointer
}

type compileArgs struct {
	head
	topology   unsafe.Pointer
	program    unsafe.Pointer
	options    span
	client     unsafe.Pointer
	executable unsafe.Pointer
}

type topologyCreateArgs struct {
	head
	name     span
	options  span
	topology unsafe.Pointer
}

type onReadyArgs struct {
	head
	event    unsafe.Pointer
	callback uintptr
	userArg  uintptr
}

type bufferFromHostArgs struct {
	head
	client    unsafe.Pointer
	data      unsafe.Pointer
	kind      int32
	dims      span
	strides   span
	semantics int32
	device    unsafe.Pointer
	memory    unsafe.Pointer
	layout    unsafe.Pointer
	done      unsafe.Pointer
	buffer    unsafe.Pointer
}

// The promises about host memory that PJRT_HostBufferSemantics lets a caller make.
const (
	hostOnlyDuringCall int32 = iota
	hostUntilTransferred
	hostImmutableZeroCopy
	hostMutableZeroCopy
)

type toHostArgs struct {
	head
	buffer unsafe.Pointer
	layout unsafe.Pointer
	dst    span
	event  unsafe.Pointer
}

// layoutTiled is PJRT_Buffer_MemoryLayout with the tiled member of its union: the row-major
// order that all host memory of ours has.
type layoutTiled struct {
	head
	tiled struct {
		head
		minorToMajor span
		tileDims     unsafe.Pointer
		tileDimLens  unsafe.Pointer
		numTiles     uintptr
	}
	kind int32 // 0: tiled
}

type executeOptions struct {
	head
	sendCallbacks unsafe.Pointer
	recvCallbacks unsafe.Pointer
	numSend       uintptr
	numRecv       uintptr
	launchID      int32
	nonDonatable  span
	context       unsafe.Pointer
	callLocation  unsafe.Pointer
	numTasks      uintptr
	taskIDs       unsafe.Pointer
	incarnations  unsafe.Pointer
	tail          [8]uintptr // multi-slice, output callbacks: unused
}

type executeArgs struct {
	head
	executable unsafe.Pointer
	options    unsafe.Pointer
	arguments  unsafe.Pointer
	numDevices uintptr
	numArgs    uintptr
	outputs    unsafe.Pointer
	events     unsafe.Pointer
	device     unsafe.Pointer
}

type compiledMemoryArgs struct {
	head
	executable unsafe.Pointer
	code       int64
	argument   int64
	output     int64
	alias      int64
	temp       int64
	host       struct{ code, argument, output, alias, temp int64 }
	peak       int64
	total      int64
	allocated  int64
	tail       [4]int64
}

type deviceMemoryArgs struct {
	head
	device         unsafe.Pointer
	inUse          int64
	peakInUse      optionalInt
	numAllocs      optionalInt
	largestAlloc   optionalInt
	limit          optionalInt
	reserved       optionalInt
	peakReserved   optionalInt
	reservable     optionalInt
	largestFree    optionalInt
	pool, peakPool optionalInt
	peakAllocated  optionalInt
}

type optionalInt struct {
	value int64
	set   bool
}

// outputArgs is the argument of calls that give a list for each result, with its length.
type outputArgs struct {
	head
	executable unsafe.Pointer
	outputs    uintptr
	items      unsafe.Pointer
	lens       unsafe.Pointer
}

type loadArgs struct {
	head
	client  unsafe.Pointer
	data    span
	loaded  unsafe.Pointer
	options span
	load    unsafe.Pointer
}

type processInfo struct {
	size        uintptr
	task        int32
	incarnation uint64
	state       int32
	code        int32
	message     span
}

type updateProcessesArgs struct {
	head
	client unsafe.Pointer
	infos  span
}

// bufferTypes are the numbers of PJRT_Buffer_Type.
var bufferTypes = map[dtype.DType]int32{
	dtype.Pred: 1, dtype.S8: 2, dtype.S16: 3, dtype.S32: 4, dtype.S64: 5,
	dtype.U8: 6, dtype.U16: 7, dtype.U32: 8, dtype.U64: 9,
	dtype.F16: 10, dtype.F32: 11, dtype.F64: 12, dtype.BF16: 13, dtype.C64: 14, dtype.C128: 15,
	dtype.F8E5M2: 16, dtype.F8E4M3FN: 17, dtype.S4: 21, dtype.U4: 22,
	dtype.F8E8M0FNU: 28, dtype.F4E2M1FN: 29,
}

func typeOfBuffer(kind int32) dtype.DType {
	for d, k := range bufferTypes {
		if k == kind {
			return d
		}
	}
	return dtype.Invalid
}
