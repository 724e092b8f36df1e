"""Code that a method runs in the target: it opens the private channel and executes what arrives there.

Theory of operation
    It runs on a native thread created by python_stub.c, with its own globals, which hold sys.modules: not on any thread
    of the program, and not in its `__main__`. It claims the token, makes the socket pair and the memfd named after the
    daemon's end, waits at most CHANNEL_WAIT_S for one packet, closes the daemon's end and the memfd, and executes the
    packet: `kineto_agent.bootstrap.loader`, which gets the channel and the descriptors sent with it. If the loader
    returns a function, that is the agent's work, and this thread runs it.

    Only `sys._kineto_attach` stays: the last token, so that a late or repeated bootstrap does nothing, and what the
    loader keeps for the next attach. Its "open" lists what a child forked in between must close. One fork hook for the
    life of the process closes it, and lets `native` repair the dynamic loader's state, which is inconsistent in a child
    that was forked while our thread opened a library.

    From Python 3.12 on, our thread would make a single-threaded program print a warning on stderr when it forks. So the
    stub adds filters for exactly this text to the interpreter's list before it starts any thread. They are removed when
    the agent has its own (kineto_agent.system.fork_warnings), when this thread ends, and in a child.

    A program may close descriptors that it did not open and reuse their numbers. os.socketpair and the like release the
    GIL and get it back up to 5 ms later: by then their numbers may belong to the program. So descriptors are created,
    identified (device and inode), received and closed by system calls that keep the GIL (`syscall` through _ctypes),
    right after the GIL was acquired: Python code of the program cannot run in between. It can if our thread gets no CPU
    for 5 ms: so the fork hook knows the buffer that the kernel writes numbers into beforehand (q), and searches the
    numbers that descriptors are moved to for one that is being moved. Each descriptor is moved, by F_DUPFD, to the high
    end of the table, which a program that opens as many as it has closed does not reach: the kernel hands out the
    lowest numbers first. Only such a number is waited for and read; at worst it is closed.

    No import statement: builtins.__import__ may be the program's, and so may a module of that name in its folder.
    It uses modules that every interpreter imports at start-up, and _socket and _ctypes from the interpreter's own
    folder, which `native` (opening_stub.c) opens without the GIL. For the same reason dlopen, dlsym and syscall are
    passed as addresses. `own` creates an extension module once per process.
"""

import re

from kinetod.attach.attach_types import MAX_BOOTSTRAP_BYTES, AttachCode, AttachError, Bootstrap

LACKING = "standard library: no "  # and a module that it should have
DENIED = "; EACCES %d %s"  # then, if that user (uid) may not look at that file of it
CHANNEL_WAIT_S = 10  # for the daemon to find the channel and send the agent; then it is closed

_DENIED_WORDS = re.compile(r"; EACCES (\d+) ([^'\")]*)")
_UNOPENED = re.compile(r"^ImportError\('/[^']*/lib-dynload/[^']*'\)$")  # of `own`

AT_THE_END = 24  # so many numbers at the end of the table of descriptors are for us
FIRST_NUMBER = 64 - AT_THE_END  # of the smallest table

# System call numbers: socketpair, fcntl, fstat, memfd_create, recvmsg and close. 0x80005 is SOCK_SEQPACKET |
# SOCK_CLOEXEC, 1030 F_DUPFD_CLOEXEC, 2 MSG_PEEK, 0x40000040 MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 5 FUNCFLAG_CDECL |
# FUNCFLAG_PYTHONAPI, 0x1000000 CO_FUTURE_ANNOTATIONS.
_SOURCE = """\
__name__='kineto_boot'
def boot(k):
 y,p,F,X=[modules[n]for n in('sys','posix','_frozen_importlib','_frozen_importlib_external')]
 B,E=F.BuiltinImporter,X.ExtensionFileLoader
 def own(c):
  S=c.name;f=c.origin
  if S in s:return s[S]
  N=native(f.encode('utf8','surrogateescape'),'PyInit_'+S,0,0,0,c,S,f,{})
  if not N:raise ImportError(f)
  F._init_module_attrs(c,N)
  s[S]=N
  return N
 def ext(S):
  h=modules.get(S,s)
  l=getattr(h,'__loader__',0)
  if l is B or type(l)is E:return h
  c=B.find_spec(S)
  if c:
   N=F.module_from_spec(c)
   c.loader.exec_module(N)
   if h is s:modules.pop(S,h)
   else:modules[S]=h
   return N
  z=''
  for d in['%s/%s/python%d.%d/lib-dynload'%(y.base_exec_prefix,y.platlibdir,*y.version_info[:2])]+y.path:
   for e in X.EXTENSION_SUFFIXES:
    f='%s/%s'%(d,S+e)
    try:
     if'/lib-dynload'==d[-12:]and p.stat(f):return own(X.spec_from_file_location(S,f,loader=E(S,f)))
    except OSError as x:z='DENIED'%(p.geteuid(),f)*(x.errno==13)or z
  raise ImportError('LACKING'+S+z)
 s=y.__dict__.setdefault('_kineto_attach',{'tokens':{},'open':[]})
 n=s['tokens'];m=object()
 if n.setdefault(k,m)is not m or max([*n])>k:return
 for x in[*n]:
  if x<k:n.pop(x,m)
 T,N=ext('_ctypes'),ext('_socket')
 class L(T._SimpleCData):_type_='l'
 class C(T.CFuncPtr):_flags_=5;_restype_=L
 C=C(syscall)
 W,D,Z,M,R,O=(53,72,5,319,47,3)if p.uname()[4]=='x86_64'else(199,25,80,279,212,57)
 o=s['open'];G=lambda:p.stat('/');A=HIGH
 def I(x):
  q=bytes(144)
  return q[:16*(C(Z,x,q)==0)]
 class H:
  q=()
  def __init__(h,x):h.x=x;h.i=I(x);o.append(h)
  def up(h):
   x=h.x;u=C(D,x,1030,A)
   if u>0:I(x)==h.i and C(O,x);h.x=u
   return h
  def close(h):
   [C(O,x)for x in h.q if~x];x=h.x
   if x is None:return
   if type(x)is not int:h.x=x=x.detach()
   G()
   if h.x==x:[C(O,x)for x in[x,*range(A,A+9)]if I(x)==h.i]
   h.x=None;h in o and o.remove(h)
 def new(q,*a):
  h=H(-1);h.q=memoryview(q).cast('i');n=C(*a);d=[H(x)for x in h.q if~x];o.remove(h);return n,*map(H.up,d)
 def close(*a):
  a or native(b'',None,0,0,0)
  for h in a or o[:]:h.close()
 if'fork'not in s:
  s['fork']=1
  p.register_at_fork(after_in_child=close)
 G();q=b'\\xff'*8;e=q*8;_,r,v=new(q,W,1,0x80005,0,q)
 f=H(C(M,b'kineto-%d-%d'%(k,v.x),1)).up()
 if f.x<0:close(r,v,f);raise OSError('memfd')
 d=[]
 try:
  a=r.x=N.socket(1,5,0,r.x)
  try:
   a.settimeout(WAIT);a.recv(1,2);g=bytes(65536);P=bytes.__basicsize__-1
   n=lambda*x:b''.join(x.to_bytes(8,'little')for x in x)
   j=n(id(g)+P,65536);j=n(0,0,id(j)+P,1,id(e)+P,64,0),j;G()
   if I(a.fileno())!=r.i:return close(r)
   n,*d=new(memoryview(e)[16:],R,a.fileno(),j[0],0x40000040)
   g=g[:n]
  finally:close(v,f)
  n={**globals(),'__name__':'kineto_loader','own':own,'high':A}
  exec(compile(g,'<kineto-loader>','exec',0x1000000),n)
  return n['load'](s,a,[h.x for h in d])
 except BaseException as x:
  try:
   if I(a.fileno())==r.i:a.send(b'E'+repr(x).encode()[:500])
  except Exception:raise x
  finally:close(r,v,f,*d)
work=boot(TOKEN)
if work:work()
"""


def make(token: int, first_number: int = FIRST_NUMBER) -> Bootstrap:
    """Builds the bootstrap of one attach. token: Unix ns, greater than that of any earlier attach. first_number: our
    descriptors have this number or a higher one, where the limit allows it.
    """
    words = {"TOKEN": token, "WAIT": CHANNEL_WAIT_S, "HIGH": first_number, "LACKING": LACKING, "DENIED": DENIED}
    source = re.sub("|".join(words), lambda word: str(words[word[0]]), _SOURCE).encode("ascii")
    assert len(source) <= MAX_BOOTSTRAP_BYTES, len(source)
    return Bootstrap(token, source)


def lacking(pid: int, words: str) -> AttachError | None:
    """The error if the interpreter lacks a module of its standard library; None if these words of its exception say
    something else.
    """
    if denied := _DENIED_WORDS.search(words):
        return AttachError(
            AttachCode.UNSUITABLE,
            f"process {pid}, running as uid {denied[1]}, was not allowed to read {denied[2]}, which the agent needs. "
            "Make Python's standard library readable for that user (chmod -R o+rX), or call kineto_agent.start() "
            "before the process switches to that user. If that user can already read the file, the process keeps "
            "switching users: try again",
        )
    if LACKING not in words and _UNOPENED.search(words) is None:
        return None
    return AttachError(
        AttachCode.UNSUPPORTED,
        f"Python in process {pid} cannot find its standard library, which the agent needs ({words}). Its environment "
        "may have been removed or moved, the user it runs as may not be allowed to read it, the program may be frozen "
        "(cx_Freeze), or the interpreter may have been built without libffi (no _ctypes). Restart the process from a "
        "complete environment, or call kineto_agent.start() in it",
    )
