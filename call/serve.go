package call

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/capture/aten"
	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
)

// Verb is the first argument of a child. It stands in no help: people have nothing to say to it.
// GPU is the second argument of one that runs on a GPU; others run on the CPU.
const (
	Verb = "__call"
	GPU  = "gpu"
)

// socket is the descriptor of the child's end: its standard input.
const socket = 0

// version is the version of the protocol.
const version = 1

// maxMessage bounds a message: a hundred thousand tensors of long names.
const maxMessage = 64 << 20

// A request is what the caller asks for; which fields are read depends on Do.
type request struct {
	N     int64   `json:"n"`
	Do    string  `json:"do"`
	Free  []int64 `json:"free"`  // calls whose backward pass will not be asked for
	Unmap []int64 `json:"unmap"` // blocks

	Block, Size int64            // map
	Handle      []byte           // map: of a GPU's memory, instead of a descriptor
	Path        string           // open
	Program     int64            // compile, bind, close
	Places      map[string]place // bind
	Wish        wish             // compile
	Variant     int64            // forward
	Args, Outs  []place          // forward; backward has the gradients' places in Outs
	Call        int64            // backward: the number of the forward request
	Seeds       []place          // backward
	fd          int              // map: the descriptor that came along
}

// An answer has the number of its request.
type answer struct {
	N        int64       `json:"n"`
	Error    *diag.Error `json:"error,omitempty"`
	Version  int         `json:"version,omitempty"`
	Program  int64       `json:"program,omitempty"`
	Inputs   []string    `json:"inputs,omitempty"`
	Compiled *described  `json:"compiled,omitempty"`
	None     []int       `json:"none,omitempty"` // gradients that do not exist, by their place
	Live     int         `json:"live"`           // calls whose backward pass may be asked for
}

// A server answers one caller.
type server struct {
	engine   *engine.Engine
	blocks   blocks
	programs map[int64]*opened
	variants map[int64]*variant
	calls    map[int64]*pending
	fds      []int // that came and have no block yet
}

// Main serves standard input and gives the exit status. open opens the engine, when it is first
// needed.
func Main(open func(context.Context) (*engine.Engine, error)) int {
	var at unix.Stat_t
	if err := unix.Fstat(socket, &at); err != nil || at.Mode&unix.S_IFMT != unix.S_IFSOCK {
		e := diag.New(diag.BadUsage, "%s is for deepwell itself", Verb).Try("deepwell --help")
		fmt.Fprint(os.Stderr, e.Format())
		return int(diag.Usage)
	}
	unix.CloseOnExec(socket)
	go endWithParent(os.Getppid())
	s := &server{blocks: blocks{}, programs: map[int64]*opened{}, variants: map[int64]*variant{},
		calls: map[int64]*pending{}}
	requests := make(chan *request)
	go s.read(requests)
	ctx := context.Background()
	for r := range requests {
		a := &answer{}
		err := s.begin(ctx, open)
		if err == nil {
			a, err = s.guarded(ctx, r)
		}
		if err != nil {
			a = &answer{Error: diag.From(err)}
		}
		a.N, a.Live = r.N, len(s.calls)
		if err := send(a); err != nil {
			return int(diag.Failed) // the caller is gone
		}
	}
	return 0
}

// endWithParent ends the process soon after its parent: a socket stays open while a process that
// the parent has forked lives.
func endWithParent(parent int) {
	for os.Getppid() == parent {
		time.Sleep(time.Second)
	}
	os.Exit(0)
}

func (s *server) begin(ctx context.Context, open func(context.Context) (*engine.Engine, error)) (
	err error) {
	if s.engine == nil {
		s.engine, err = open(ctx)
	}
	return err
}

// read reads requests in the background, so that the end of the socket ends the process in the
// middle of its work: nobody is left to hear of it.
func (s *server) read(to chan<- *request) {
	for {
		var head [4]byte
		err := s.receive(head[:])
		size := binary.LittleEndian.Uint32(head[:])
		if err != nil || size > maxMessage {
			os.Exit(0)
		}
		body := make([]byte, size)
		r := &request{fd: -1}
		if err := s.receive(body); err != nil || json.Unmarshal(body, r) != nil {
			os.Exit(int(diag.Failed))
		}
		if r.Do == "map" && len(r.Handle) == 0 { // before the next message brings another descriptor
			if len(s.fds) > 0 {
				r.fd, s.fds = s.fds[0], s.fds[1:]
			}
		}
		to <- r
	}
}

// receive fills a buffer, and keeps descriptors that come along.
func (s *server) receive(buf []byte) error {
	oob := make([]byte, unix.CmsgSpace(4))
	for len(buf) > 0 {
		n, got, _, _, err := unix.Recvmsg(socket, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return fmt.Errorf("the socket ended: %w", err)
		}
		list, err := unix.ParseSocketControlMessage(oob[:got])
		if err != nil {
			return err
		}
		for i := range list {
			fds, err := unix.ParseUnixRights(&list[i])
			if err != nil {
				return err
			}
			s.fds = append(s.fds, fds...)
		}
		buf = buf[n:]
	}
	return nil
}

func send(a *answer) error {
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	body = append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
	for len(body) > 0 {
		n, err := unix.Write(socket, body)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}

// guarded answers a request; a bug in reading a program ends that request and not all programs.
func (s *server) guarded(ctx context.Context, r *request) (a *answer, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = diag.New(diag.Internal, "%s: %v", r.Do, p).Because("%s", debug.Stack())
		}
	}()
	return s.answer(ctx, r)
}

// answer does what a request asks for.
func (s *server) answer(ctx context.Context, r *request) (*answer, error) {
	for _, n := range r.Free {
		if p := s.calls[n]; p != nil {
			p.free()
			delete(s.calls, n)
		}
	}
	if err := s.unmap(r.Unmap); err != nil {
		return nil, err
	}
	switch r.Do {
	case "hello":
		return &answer{Version: version}, nil
	case "map":
		return &answer{}, s.mapBlock(r)
	case "open":
		return s.open(r)
	case "forward":
		v := s.variants[r.Variant]
		if v == nil {
			return nil, diag.New(diag.BadInput, "there is no variant %d", r.Variant)
		}
		p, err := s.forward(ctx, v, r.Args, r.Outs)
		if p != nil {
			s.calls[r.N] = p
		}
		return &answer{}, err
	case "backward":
		p := s.calls[r.Call]
		if p == nil {
			return nil, diag.New(diag.BufferGone, "call %d was freed, or had no gradients", r.Call)
		}
		none, err := s.differentiate(ctx, p, r.Seeds, r.Outs)
		return &answer{None: none}, err
	}
	o := s.programs[r.Program]
	if o == nil {
		return nil, diag.New(diag.BadInput, "there is no program %d, or no request %q", r.Program, r.Do)
	}
	switch r.Do {
	case "bind":
		o.unbind()
		o.places = r.Places
		o.binding++
		return &answer{}, nil
	case "compile":
		v, d, err := s.compile(ctx, o, r.Wish)
		if err != nil {
			return nil, err
		}
		d.Variant = r.N
		s.variants[r.N] = v
		return &answer{Compiled: d}, nil
	case "close":
		s.close(o)
		delete(s.programs, r.Program)
		return &answer{}, nil
	}
	return nil, diag.New(diag.BadInput, "there is no request %q", r.Do)
}

// open reads an archive.
func (s *server) open(r *request) (*answer, error) {
	a, err := pt2.Open(r.Path)
	if err != nil {
		return nil, err
	}
	f, err := aten.NewFunction(a)
	if err != nil {
		_ = a.Close()
		return nil, err
	}
	s.programs[r.N] = &opened{archive: a, function: f, arrays: map[string]*engine.Array{}}
	return &answer{Program: r.N, Inputs: f.Inputs()}, nil
}

// close frees a program with its variants and calls.
func (s *server) close(o *opened) {
	for n, p := range s.calls {
		if p.v.owner == o {
			p.free()
			delete(s.calls, n)
		}
	}
	for n, v := range s.variants {
		if v.owner == o {
			v.free()
			delete(s.variants, n)
		}
	}
	o.free()
}
