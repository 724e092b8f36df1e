"""The code that a method makes the target run: it opens the private channel and runs what comes over it.

Theory of operation
    It runs on a native thread that python_stub.c has made, with globals of its own in which it finds sys.modules: not
    on any thread of the program, and not in its `__main__`. It claims the token, makes the socket pair and the memfd
    whose name tells which end is the daemon's, waits at most CHANNEL_WAIT_S for one packet, closes the daemon's end
    and the memfd, and executes the packet: the loader of `kineto_agent.boot.loader`, which is given the channel and
    the descriptors that came along. The loader's answer, if it is one, is the agent's own work, done on this thread.

    `sys._kineto_attach` is all that stays: the last token, so that a bootstrap which comes late or twice does
    nothing, and what the loader keeps for the next attach. "open" there is what a child forked meanwhile must close;
    one fork hook for the life of the process does so.

    A program may close descriptors that it did not open, and use their numbers anew. So what is closed after a wait is
    looked at before (device and inode), and the packet is taken only if the number still is the channel. That is
    noted when the channel can be seen already: each look may give the GIL away, for 5 ms if the program wants it. What
    such a look has seen may be past; it is repeated until one took less than 0.1 ms.

    No import statement: builtins.__import__ may be the program's, and so may a module of that name in its folder.
    What is needed are modules that every interpreter has imported since its start, and _socket, which is taken from
    where the interpreter has its own. Where the program has put a function of its own in the place of
    time.perf_counter, the interpreter makes that module once more, for us.
"""

from kinetod.attach.interface import MAX_BOOTSTRAP_BYTES, Bootstrap

CHANNEL_WAIT_S = 10  # for the daemon to find the channel and send the agent; then it is closed

# 5 is SOCK_SEQPACKET, 2 MSG_PEEK, 0x40000040 MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 319 and 279 memfd_create (missing in a
# Python that was built for an old C library), 0x1000000 CO_FUTURE_ANNOTATIONS.
_SOURCE = """\
__name__='kineto_boot'
def boot(k):
 y,p,F,X,I=[modules[n]for n in('sys','posix','_frozen_importlib','_frozen_importlib_external','_imp')]
 B,E,S=F.BuiltinImporter,X.ExtensionFileLoader,'_socket'
 C=getattr(modules.get('time'),'perf_counter',0)
 if type(C)is not type(len):
  t=F.module_from_spec(B.find_spec('time'));B.exec_module(t)
  C=t.perf_counter
 N=modules.get(S)
 l=getattr(N,'__loader__',0)
 if l is not B and type(l)is not E:
  c=B.find_spec(S)
  for d in['%s/%s/python%d.%d/lib-dynload'%(y.base_exec_prefix,y.platlibdir,*y.version_info[:2])]+y.path:
   if not c and d.endswith('/lib-dynload'):c=X.FileFinder(d,(E,I.extension_suffixes())).find_spec(S)
  h=N
  N=F.module_from_spec(c)
  c.loader.exec_module(N)
  if h:modules[S]=h
  else:modules.pop(S,h)
 s=y.__dict__.setdefault('_kineto_attach',{'tokens':{},'open':[]})
 n=s['tokens'];m=object()
 if n.setdefault(k,m)is not m or max(list(n))>k:return
 for x in list(n):
  if x<k:n.pop(x,m)
 o=s['open']
 def same(x):
  for _ in range(50):
   t=C()
   try:q=p.fstat(x if type(x)is int else x.fileno())
   except OSError:return
   if C()-t<1e-4:break
  return q.st_dev,q.st_ino
 class Held:
  def __init__(h,x):h.x=x;h.i=0;o.append(h)
  def close(h):
   if h in o:o.remove(h)
   x,h.x=h.x,None
   if x is None:return
   if not h.i or same(x)==h.i:p.close(x)if type(x)is int else x.close()
   elif type(x)is not int:x.detach()
 def close(*a):
  for h in a or o[:]:
   try:h.close()
   except OSError:pass
 if 'fork' not in s:
  s['fork']=1
  p.register_at_fork(after_in_child=close)
 d=[]
 a,b=N.socketpair(1,5)
 r,v=Held(a),Held(b)
 try:
  w='kineto-%d-%d'%(k,b.fileno())
  if hasattr(p,'memfd_create'):f=p.memfd_create(w,1)
  else:
   import ctypes
   f=ctypes.CDLL(None).syscall({'x86_64':319,'aarch64':279}[p.uname()[4]],w.encode(),1)
  f=Held(f)
  for h in r,v,f:h.i=same(h.x)or 1
  try:
   a.settimeout(WAIT)
   a.recv(1,2)
   if same(a)!=r.i:return close(r)
   g,c,_,_=a.recvmsg(65536,N.CMSG_SPACE(32),0x40000040)
  finally:close(v,f)
  d=[Held(x)for c in c for x in memoryview(c[2]).cast('i')]
  for h in d:h.i=same(h.x)or 1
  n={'__name__':'kineto_loader','__builtins__':__builtins__,'modules':modules}
  exec(compile(g,'<kineto-loader>','exec',0x1000000),n)
  return n['load'](s,a,[h.x for h in d])
 except BaseException as x:
  try:
   if same(a)==r.i:a.send(b'E'+repr(x).encode()[:500])
  except OSError:pass
  close(r,*d)
work=boot(TOKEN)
if work:work()
"""


def make(token: int) -> Bootstrap:
    """The bootstrap of one attach. token: greater than that of any attach before (Unix ns)."""
    source = _SOURCE.replace("TOKEN", str(token)).replace("WAIT", str(CHANNEL_WAIT_S)).encode("ascii")
    assert len(source) <= MAX_BOOTSTRAP_BYTES, len(source)
    return Bootstrap(token, source)
